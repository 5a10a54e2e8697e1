"""``data_parallel_size``: several engines, each with the whole model on GPUs of its own, behind one link.

Each request goes to one of them (:mod:`tritonllm.serve.engines.placement`). To
:class:`~tritonllm.serve.engines.async_llm.AsyncLLM` they look like one engine: their statistics are added up, and what
it tells the engine to do, all of them do. If one dies, its requests end with an error and the others go on; the link
has failed when all are dead and none is started anew (:mod:`tritonllm.serve.engines.restarts`).
"""

import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

import msgspec
import torch

from tritonllm.config.engine import EngineConfig
from tritonllm.dist.connect import local_store
from tritonllm.dist.lockstep import Board, ExpertPlace
from tritonllm.engine.data.request import packed_from
from tritonllm.engine.data.stats import EngineStats
from tritonllm.serve.engines import profiling
from tritonllm.serve.engines.engine_client import EngineClient, EngineDeadError, EngineLink, EngineProcess
from tritonllm.serve.engines.messages import Abort, Add, Answer, Call, EngineReady, News, RequestFailure, ToEngine
from tritonllm.serve.engines.placement import Placement
from tritonllm.serve.engines.profiling import ProfilerConfig
from tritonllm.serve.engines.restarts import STARTING, Restarts, StartingProcess

logger = logging.getLogger(__name__)
MOST_TOKENS = 1 << 30  # of a request without max_tokens


def start_engines(
    config: EngineConfig,
    log_level: int | None = None,
    meanwhile: Callable[[], object] = lambda: None,
    profiler: ProfilerConfig | None = None,
    max_restarts: int = 0,
) -> "EngineClient | Replicas":
    """Start as many engines as ``data_parallel_size`` says, all at once. Arguments and errors as of
    :class:`EngineClient`; if one does not start, none is left. ``max_restarts``: see :class:`Restarts`."""
    count, each = config.parallel.data_parallel_size, config.parallel.world_size
    if count == 1 and not max_restarts:
        return EngineClient(config, log_level, meanwhile, profiler=profiler)
    check_gpus(config)
    started: list[EngineProcess] = []
    links: dict[int, EngineClient] = {}
    if config.parallel.shares_experts and max_restarts:
        raise ValueError(
            f"restart={max_restarts}: engines that share experts (data_parallel_size={count} with "
            "enable_expert_parallel) cannot be started anew one by one: leave it out, and have the server started again"
        )
    shared = SharedExperts(config) if config.parallel.shares_experts else None
    each_config = config  # one that shares experts knows with how many
    if shared is None:
        each_config = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, data_parallel_size=1))

    def devices(number: int) -> range | None:
        # those that share experts reach each other's memory: each sees all GPUs
        return None if count == 1 or shared is not None else range(number * each, (number + 1) * each)

    def name(number: int) -> int | None:
        return None if count == 1 else number

    def start_again(number: int) -> StartingProcess:
        return StartingProcess(each_config, log_level, devices(number), profiler, name(number))

    try:
        for number in range(count):
            place = None if shared is None else shared.place(number)
            started.append(EngineProcess(each_config, log_level, devices(number), profiler, name(number), place))
        meanwhile()
        # one that shares experts waits for the others: who does not start is to be heard of first
        order = range(count) if shared is None else _by_arrival([process.reports for process in started])
        for number in order:
            links[number] = _ready(name(number), each_config, started[number])
    except BaseException:
        for link in links.values():
            link.close() if shared is None else link.kill()
        for process in started:
            process.kill()
        raise
    return Replicas(
        [links[number] for number in range(count)], config.block_tokens, Restarts(max_restarts, start_again), shared
    )


class SharedExperts:
    """Where engines meet that share a model's experts; lives as long as they do.

    Args:
        config: the configuration of all of the engines.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._store, self._port = local_store()
        self._board = Board(config.parallel.data_parallel_size)

    def place(self, number: int) -> ExpertPlace:
        """The place of one of the engines."""
        return ExpertPlace(number, self._port, self._board)


def _by_arrival(reports: Sequence[Connection]) -> Iterator[int]:
    """The numbers of engines, each when it has said how its start went, or has ended."""
    left = dict(enumerate(reports))
    while left:
        come = wait(left.values())
        for number in [number for number, report in left.items() if report in come]:
            del left[number]
            yield number


def check_gpus(config: EngineConfig) -> None:
    """Check that there are GPUs for all engines: one that finds no GPU left would run on the CPU.

    Raises:
        ValueError: there are GPUs, but not enough for all engines.
    """
    count, each = config.parallel.data_parallel_size, config.parallel.world_size
    if count > 1 and config.model.device in ("auto", "cuda") and 0 < torch.cuda.device_count() < count * each:
        raise ValueError(
            f"data_parallel_size={count} times {config.parallel.sizes} needs {count * each} GPUs, and this process "
            f"sees {torch.cuda.device_count()}: lower one of them"
        )


def _ready(name: int | None, config: EngineConfig, process: EngineProcess) -> EngineClient:
    """Raises as :class:`EngineClient`, with the engine's name."""
    try:
        return EngineClient(config, process=process)
    except (ValueError, RuntimeError) as error:
        if name is None:
            raise
        kind = ValueError if isinstance(error, ValueError) else RuntimeError
        raise kind(f"replica {name}: {error}") from error


def together(stats: Sequence[EngineStats]) -> EngineStats:
    """The statistics of several engines as those of one: counts are added."""
    total: dict[str, Any] = {}
    for name in [field.name for field in dataclasses.fields(EngineStats)]:
        values = [getattr(one, name) for one in stats]
        if name == "takes_requests":
            total[name] = all(values)
        elif name == "is_sleeping":
            total[name] = any(values)
        elif name == "num_accepted_tokens_per_pos":
            longest = max(map(len, values))
            padded = [(*value, *([0] * (longest - len(value)))) for value in values]
            total[name] = tuple(map(sum, zip(*padded, strict=True)))
        else:
            total[name] = sum(values)
    return EngineStats(**total)


class Replicas:
    """A link to several ready engines, which it owns.

    Args:
        links: a link to each engine.
        block_tokens: how many tokens a block of their caches holds, over all ranks of an engine.
        restarts: starts engines anew that die; ``None``: nobody does.
        shared: the experts that they share, if they do: none can go on without the others.

    Attributes:
        failure: why none of them can be used any more; ``None`` while one can, or is started anew.
        ready: what the engines have told at their start, as of one engine.
        stats: the latest statistics of each engine.
        restarted: how often each was started anew.
        deaths: which of them have died and why, the first one first.
    """

    def __init__(
        self,
        links: Sequence[EngineLink],
        block_tokens: int,
        restarts: Restarts | None = None,
        shared: SharedExperts | None = None,
    ) -> None:
        self._restarts, self._shared = restarts, shared
        self.restarted = [0] * len(links)
        self.deaths: list[str] = []
        self._past: dict[int, EngineStats] = {}  # what engines had counted before they were started anew
        self._links = list(links)
        self._living = set(range(len(self._links)))
        told = [link.ready for link in self._links]
        self.stats = [one.stats for one in told]
        self.ready: EngineReady = msgspec.structs.replace(
            told[0], max_num_seqs=sum(one.max_num_seqs for one in told), stats=together(self.stats)
        )
        self.failure: str | None = None
        self._placement = Placement([block_tokens * one.stats.num_blocks for one in told])
        self._owners: dict[str, tuple[int, int]] = {}  # of an id: the replica, and how many requests of that id it has
        self._calls: dict[int, tuple[set[int], list[Answer]]] = {}  # whose answers are missing, and those that came
        self._on_news: Callable[[News], None] = lambda news: None
        self._on_death: Callable[[str], None] = lambda why: None

    @property
    def pid(self) -> int | None:
        """The process id of the first engine that lives; ``None`` if none does."""
        return self._links[min(self._living)].pid if self._living else None

    @property
    def living(self) -> list[bool]:
        """For each engine, by its number, whether it lives."""
        return [number in self._living for number in range(len(self._links))]

    @property
    def pids(self) -> list[int | None]:
        return [link.pid for link in self._links]

    def attach(self, on_news: Callable[[News], None], on_death: Callable[[str], None]) -> None:
        """As :meth:`EngineLink.attach`; ``on_death`` is called when the last one has died."""
        self._on_news, self._on_death = on_news, on_death
        for number, link in enumerate(self._links):
            link.attach(partial(self._take, number), partial(self._died, number))

    def send(self, message: ToEngine) -> None:
        """Queue a message for the replica, or for all replicas, that it concerns. Raises as :meth:`EngineLink.send`."""
        if self.failure is not None:
            raise EngineDeadError(self.failure)
        if not self._living and not isinstance(message, Abort):
            raise EngineDeadError(STARTING)
        if isinstance(message, Add):
            self._place(message)
        elif isinstance(message, Abort):
            for number in sorted(self._living):
                mine = [one for one in message.request_ids if self._owners.get(one, (-1, 0))[0] == number]
                if mine:
                    self._links[number].send(Abort(mine))
        else:
            concerned = sorted(self._living)
            if isinstance(message, Call):
                if message.method in ("activity", "expert_load"):
                    concerned = [number for number in concerned if message.replica in (number, None)][:1]
                    if not concerned:
                        raise EngineDeadError(f"replica {message.replica} has died")
                elif message.method not in profiling.METHODS:
                    self._placement.forget()  # whatever it is, it may empty the caches
                if message.method == "reload_weights" and self._restarts is not None:
                    self._restarts.stop()  # an engine started anew would have the weights of the beginning
                self._calls[message.number] = set(concerned), []
            for number in concerned:
                self._links[number].send(message)

    def _place(self, message: Add) -> None:
        """Send a request to the replica that still has a request of this id, if one has: its last update must come
        before those of the new one."""
        request_id = message.request_id
        owner, count = self._owners.get(request_id, (None, 0))
        if owner is None:
            owner = self._placement.place(
                request_id,
                packed_from(message.packed),
                message.params.get("max_tokens") or MOST_TOKENS,
                message.cache_salt,
                message.params.get("n", 1),
            )
        try:
            self._links[owner].send(message)
        except BaseException:
            if not count:
                self._placement.end(request_id)
            raise
        self._owners[request_id] = owner, count + 1

    def _take(self, number: int, news: News) -> None:
        past = self._past.get(number)
        self.stats[number] = news.stats if past is None else together([past, news.stats])
        for output in news.outputs:
            self._placement.progress(output.request_id, sum(len(one.token_ids) for one in output.outputs))
        for update in news.updates:
            if update.finished:
                self._ended(update.request_id)
        answers = [answer for one in news.answers if (answer := self._answered(number, one)) is not None]
        self._on_news(dataclasses.replace(news, stats=together(self.stats), answers=answers))

    def _ended(self, request_id: str) -> None:
        owner, count = self._owners.pop(request_id, (0, 0))
        if count > 1:
            self._owners[request_id] = owner, count - 1
        else:
            self._placement.end(request_id)

    def _answered(self, number: int, answer: Answer) -> Answer | None:
        """The answer of all, once it is known: the first error, if there is one, with the replica's name in front. (Not
        if it is about an argument, which all of them got.)"""
        missing, came = self._calls.get(answer.number, (set(), []))
        if answer.error is not None and not answer.is_value_error and len(self._links) > 1:
            answer = Answer(answer.number, error=f"replica {number}: {answer.error}")
        missing.discard(number)
        came.append(answer)
        return None if missing else self._conclude(answer.number)

    def _conclude(self, call: int) -> Answer | None:
        _, came = self._calls.pop(call, (set(), []))
        if not came:
            return None
        wrong = next((answer for answer in came if answer.error is not None), None)
        if wrong is not None:
            return wrong
        values = [answer.value for answer in came]
        if isinstance(values[0], dict):  # of traces; a replica whose own has ended by itself may refuse
            traced = [value for value in values if "file" in value]
            if traced:
                return Answer(call, traced[0] | {"files": sorted(value["file"] for value in traced)})
        return Answer(call, all(values) if isinstance(values[0], bool) else values[0])

    def _died(self, number: int, why: str) -> None:
        self._living.discard(number)
        self._links[number].close()
        self.deaths.append(f"replica {number}: {why}")
        if self._shared is not None:
            self._end_all(number, why)
            return
        comes_back = self._begin_restart(number)
        if self._has_failed(why):
            return
        why = f"replica {number}: {why}"
        what = ", and it is started again" if comes_back else ""
        logger.error("%s; %d of %d go on%s", why, len(self._living), len(self._links), what)
        self._placement.lose(number)
        lost = [request_id for request_id, (owner, _) in self._owners.items() if owner == number]
        failures = []
        for request_id in lost:
            _, count = self._owners.pop(request_id)
            failures += [RequestFailure(request_id, why, "lost")] * count
        self._past[number] = self.stats[number] = _totals(self.stats[number])
        answers = []
        for call, (missing, _) in list(self._calls.items()):
            if number in missing:
                missing.discard(number)
                if not missing:
                    answers.append(self._conclude(call) or Answer(call, error=why))
        self._on_news(News([], together(self.stats), answers, failures=failures))

    def _end_all(self, first: int, why: str) -> None:
        """End all engines that share experts, since one has died, and the others wait for it in the middle of a step;
        or they have seen that before this process, and ended."""
        if self.failure is not None:
            return
        killed = next((number for number in sorted(self._living) if self._links[number].was_killed), None)
        if killed is not None and not self._links[first].was_killed:
            first, why = killed, "the engine process was killed"
        for number in self._living:
            self._links[number].kill()
        self._living.clear()
        self.deaths[:] = [f"replica {first}: {why}"]
        self.failure = f"{self.deaths[0]}; the others, which share experts with it, were ended with it"
        self._on_death(self.failure)

    def _has_failed(self, why: str) -> bool:
        """Whether none lives and none will, which is told."""
        if self._living or (self._restarts is not None and self._restarts.under_way):
            return False
        self.failure = why
        self._on_death(why)
        return True

    def _begin_restart(self, number: int) -> bool:
        return self._restarts is not None and self._restarts.begin(number, partial(self._came_back, number))

    def _came_back(self, number: int, found: EngineLink | Exception) -> None:
        if isinstance(found, Exception):
            logger.error("replica %d did not start: %s", number, found)
            if not self._begin_restart(number):
                self._has_failed(f"the engine did not start again: {found}")
            return
        self._links[number] = found
        self._living.add(number)
        self.restarted[number] += 1
        self._placement.find(number)
        found.attach(partial(self._take, number), partial(self._died, number))
        logger.warning("replica %d runs again", number)
        self._take(number, News([], found.ready.stats))

    def close(self) -> None:
        """End all of them. May be called again."""
        if self._restarts is not None:
            self._restarts.close()
        for number in sorted(self._living):  # told first, so that they end at the same time
            link = self._links[number]
            if isinstance(link, EngineClient):
                link.tell_to_stop()
        for link in self._links:
            link.close()
        self.failure = self.failure or "the engine was shut down"


# What a dead replica has counted stays in the sums; what it had in use, and its state, do not.
_OF_NOW = {"num_running", "num_waiting", "num_blocks", "num_free_blocks", "num_host_blocks", "num_used_host_blocks"}
_STATES = {"takes_requests", "is_sleeping"}


def _totals(stats: EngineStats) -> EngineStats:
    gone: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(EngineStats)}
    return dataclasses.replace(stats, **{name: gone[name] for name in _OF_NOW | _STATES})
