"""The process that runs the engine: takes requests from a socket, steps, sends what is new.

It ends when it is told to, when it cannot go on, or when its parent has died (a thread waits for that). Ctrl-C and
SIGTERM reach all processes of a terminal or of a service: here they are ignored, the parent decides when to stop.
"""

import dataclasses
import gc
import logging
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Sequence
from concurrent import futures
from multiprocessing.connection import Connection
from typing import Any, Literal

import msgspec
import torch
import zmq

from tritonllm import env
from tritonllm.config.beam_search_params import BeamSearchParams
from tritonllm.config.engine import EngineConfig
from tritonllm.config.pooling_params import PoolingParams
from tritonllm.config.sampling_params import SamplingParams
from tritonllm.dist.lockstep import ExpertPlace, LeftError
from tritonllm.dist.watch import WorkerError
from tritonllm.engine.data.asleep import AsleepError
from tritonllm.engine.data.outputs import (
    EngineOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestMetrics,
    RequestOutput,
)
from tritonllm.engine.data.request import packed_from
from tritonllm.engine.data.results import StepTimeoutError
from tritonllm.engine.data.stats import EngineStats
from tritonllm.engine.loop.engine import LLMEngine
from tritonllm.engine.text.input_processor import TokenizedPrompt
from tritonllm.experts.load import ExpertLoad
from tritonllm.models import checkpoint
from tritonllm.serve.engines import profiling
from tritonllm.serve.engines.activity import Activity
from tritonllm.serve.engines.child_process import end_with_parent, log_to_stderr
from tritonllm.serve.engines.lockstep_engines import LockstepEngines, end_if_silent
from tritonllm.serve.engines.messages import (
    Abort,
    Add,
    Answer,
    Call,
    EngineReady,
    Failed,
    News,
    RequestFailure,
    Stop,
    ToEngine,
    Update,
    encode_news,
    leave_prompt,
    pack_params,
    unpack_params,
)
from tritonllm.serve.engines.pooling_messages import pooling_facts
from tritonllm.serve.engines.profiling import ProfilerConfig, Profiles
from tritonllm.system.starting import leave_out_of_searches

logger = logging.getLogger(__name__)
# Of the engine, that a Call may name.
METHODS = ("sleep", "wake_up", "reload_weights", "reset_prefix_cache", "expert_load", "reset_expert_load")
WAITING = ("sleep", "reload_weights")  # for the requests that are unfinished
Params = SamplingParams | BeamSearchParams | PoolingParams
AT_ONCE = 0.001  # seconds that a request's grammar may take to be parsed while nothing else happens
TAKING = 0.02  # seconds of messages between two steps, from the first one on
ONLY_PARSING = 0.02  # seconds between two looks at the messages while grammars are parsed and nothing runs
ONLY_SAVING = 0.05  # seconds between two looks at the statistics while blocks are saved and nothing runs


@dataclasses.dataclass(eq=False)
class Parsing:
    """A request that is added once its grammar is parsed, and aborted then if that was asked for.

    Attributes:
        grammar: ``None`` for one without, which only comes after another of its id.
    """

    grammar: futures.Future[Any] | None
    client: bytes
    message: Add
    params: Params
    aborted: bool = False


def run_engine(
    config: EngineConfig,
    folder: str,
    reports: Connection,
    log_level: int | None,
    devices: list[int] | None = None,
    profiler: ProfilerConfig | None = None,
    replica: int | None = None,
    place: ExpertPlace | None = None,
) -> None:
    """The process's main function.

    Args:
        config: the configuration of the engine.
        folder: where the sockets lie; ``folder/engine`` is bound here.
        reports: gets :class:`EngineReady` or :class:`Failed` after the start, and :class:`Failed` if the engine cannot
            go on.
        log_level: the level of the package's messages on stderr; ``None`` sets up no logging.
        devices: the indices of this machine's GPUs that the engine sees; ``None`` for all.
        profiler: how traces are written, if they may be.
        replica: which of several engines it is, for its messages; ``None`` for the only one.
        place: its place among engines that share the model's experts, if there are others.
    """
    if devices is not None:
        env.see_devices(devices)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_with_parent(folder)
    if log_level is not None:
        log_to_stderr(log_level, replica)
    encode = msgspec.msgpack.encode
    try:
        if profiler is not None:
            profiler.prepare(config.model.device, 0 if place is None else place.rank)
        engine = LLMEngine.from_config(config, place)
        ready = describe(engine)
        context = zmq.Context(io_threads=1)
        socket = context.socket(zmq.ROUTER)
        socket.set_hwm(0)  # what waits here is bounded by the number of requests and their lengths
        socket.bind(f"ipc://{folder}/engine")
    except Exception as error:
        logger.debug("the engine did not start", exc_info=True)
        kind = isinstance(error, ValueError)
        reports.send_bytes(encode(Failed(str(error) if kind else f"{type(error).__name__}: {error}", kind)))
        return
    gc.collect()
    leave_out_of_searches()  # what lives as long as the engine is not searched for garbage in the middle of a step
    reports.send_bytes(encode(ready))
    if engine.lockstep is not None:
        end_if_silent(
            engine.lockstep, config.parallel.worker_timeout, lambda why: reports.send_bytes(encode(Failed(why)))
        )
    profiles = Profiles(engine, profiler)
    try:
        EngineLoop(engine, socket, profiles).run()
    except LeftError:  # whoever told another to stop tells this one, too
        logger.info("an engine that shares experts with this one has ended, and so this one does")
    except Exception as error:
        logger.exception("the engine cannot go on")
        try:
            reports.send_bytes(encode(Failed(f"{type(error).__name__}: {error}")))
        finally:
            if engine.lockstep is not None:
                os._exit(1)  # Python's end would wait for the device, which may wait for another engine for ever
        sys.exit(1)
    finally:
        _end_profile(profiles)
        context.destroy(linger=1000)


def _end_profile(profiles: Profiles) -> None:
    try:
        profiles.close()
    except OSError:
        logger.exception("the trace could not be ended")


def describe(engine: LLMEngine) -> EngineReady:
    config = engine.config.model
    assert config.max_model_len is not None
    tokenizer = config.tokenizer
    if tokenizer is None:
        how: dict[str, Any] = {"trust_remote_code": config.trust_remote_code, "download_dir": config.download_dir}
        tokenizer = str(checkpoint.resolve(config.model, config.revision, **how))
    return EngineReady(
        tokenizer=None if config.skip_tokenizer_init else tokenizer,
        revision=config.revision if config.tokenizer else None,
        trust_remote_code=config.trust_remote_code,
        vocab_size=engine.inputs.vocab_size,
        max_model_len=config.max_model_len,
        max_num_seqs=engine.config.scheduler.max_num_seqs,
        eos_token_ids=sorted(engine.inputs.eos_token_ids),
        seed=config.seed,
        default_params=pack_params(engine.inputs.default_params),
        stats=engine.stats,
        pooling=pooling_facts(engine),
        download_dir=config.download_dir,
        max_logprobs=config.max_logprobs,
    )


def unpack(message: Add) -> Params:
    """The parameters that a message holds.

    Raises:
        ValueError: a value outside its range.
    """
    if message.search is not None:
        return BeamSearchParams(**message.search)
    return unpack_params(message.params) if message.pooling is None else PoolingParams(**message.pooling)


class EngineLoop:
    """Takes messages between steps, and waits for them when there is nothing to run.

    Args:
        engine: an engine that has started.
        socket: a bound ROUTER socket; each API process is known by its identity.
        profiles: writes traces; by default none.
    """

    def __init__(self, engine: LLMEngine, socket: Any, profiles: Profiles | None = None) -> None:
        self._profiles = profiles or Profiles(engine, None)
        self._engine = engine
        self._socket = socket
        self._decode = msgspec.msgpack.Decoder(ToEngine).decode
        self._owner: dict[str, bytes] = {}  # which API process a request is of
        self._clients: set[bytes] = set()
        self._calls: deque[tuple[bytes, Call]] = deque()  # that wait until the unfinished requests have ended
        self._parsing: deque[Parsing] = deque()  # in the order in which they came
        self._stopped = self._failed_before = False
        self._sent = EngineStats()  # what all clients know
        self._activity = Activity(engine)
        self._lockstep_engines = None if engine.lockstep is None else LockstepEngines(engine, engine.lockstep, socket)

    def run(self) -> None:
        """Take messages and run steps until :class:`Stop` comes.

        Raises:
            Exception: what broke off a step, if the device did not answer in time, a rank failed, or the step before
                failed, too.
        """
        while not self._stopped:
            self._add_parsed()
            idle = not self._engine.has_unfinished_requests()
            if idle and self._lockstep_engines is not None:
                saving = ONLY_SAVING if self._engine.is_saving else None
                self._lockstep_engines.await_work(longest=ONLY_PARSING if self._parsing else saving)
            idle &= not self._parsing
            outputs = self._take_messages(block=idle and self._lockstep_engines is None)
            if self._engine.has_unfinished_requests():
                outputs += self._step()
            self._send(outputs)
            if self._activity.is_followed:
                self._activity.rest()
            while self._calls and not self._parsing and not self._engine.has_unfinished_requests():
                self._answer(*self._calls.popleft())
        if self._engine.lockstep is not None:
            self._engine.lockstep.leave()

    def _step(self) -> list[EngineOutput]:
        try:
            outputs = self._engine.step()
        except (StepTimeoutError, WorkerError):  # nothing repairs them
            raise
        except Exception:
            if self._failed_before or self._lockstep_engines is not None:  # others are in the middle of the same step
                raise
            self._failed_before = True
            logger.exception("a step failed: all requests in the engine end with an error")
            return self._engine.step()  # their last outputs
        if outputs:
            self._failed_before = False
        return outputs

    def _take_messages(self, block: bool) -> list[EngineOutput]:
        """Do what the messages say that have arrived; with ``block``, wait for the first, while nothing else changes.

        If there is something to run, what comes when :data:`TAKING` is over waits for the next time: 2,000 requests
        would hold up a step for 0.3 s.

        Returns:
            Refusals and the last outputs of what was aborted.
        """
        outputs: list[EngineOutput] = []
        if block and self._engine.is_saving:
            block = bool(self._socket.poll(int(1000 * ONLY_SAVING)))
        flags, end = 0 if block else zmq.NOBLOCK, None
        while not self._stopped and (
            end is None or time.monotonic() < end or not self._engine.has_unfinished_requests()
        ):
            try:
                client, data = self._socket.recv_multipart(flags)
            except zmq.Again:
                break
            flags = zmq.NOBLOCK
            end = time.monotonic() + TAKING if end is None else end
            if client not in self._clients:
                self._clients.add(client)
                self._sent = EngineStats()  # a newcomer has not heard of them
            message = self._decode(data)
            if isinstance(message, Add):
                self._take_request(client, message)
            elif isinstance(message, Abort):
                for one in self._parsing:
                    one.aborted |= one.client == client and one.message.request_id in message.request_ids
                mine = [request_id for request_id in message.request_ids if self._owner.get(request_id) == client]
                self._send(outputs + self._engine.abort_request(mine))  # before the id may come again
                outputs = []
            elif isinstance(message, Call):
                outputs += self._take_call(client, message)
            else:
                self._stopped = isinstance(message, Stop)
        return outputs

    def _take_call(self, client: bytes, call: Call) -> list[EngineOutput]:
        """Do it, or let it wait; returns the last outputs of what is aborted for it."""
        if call.method not in WAITING:
            self._answer(client, call)
            return []
        if call.method == "sleep":
            try:
                self._engine.check_sleep(**call.arguments)
            except (ValueError, TypeError):  # before anybody's request is ended for it
                self._answer(client, call)
                return []
        self._calls.append((client, call))
        for one in self._parsing:
            one.aborted |= call.abort
        return self._engine.abort_request(list(self._owner)) if call.abort else []

    def _answer(self, client: bytes, call: Call) -> None:
        """Do it; whoever made the call hears of it after everybody has heard of the engine's new state."""
        try:
            if call.method not in (*METHODS, *profiling.METHODS, "activity"):
                raise ValueError(f"method must be one of {', '.join(METHODS)}, got {call.method!r}")
            does: Any = self._profiles if call.method in profiling.METHODS else self._engine
            method = self._activity.tell if call.method == "activity" else getattr(does, call.method)
            value = method(**call.arguments)
            answer = Answer(call.number, value.as_json() if isinstance(value, ExpertLoad) else value)
        except (ValueError, TypeError) as error:
            answer = Answer(call.number, error=str(error), is_value_error=True)
        except (RuntimeError, MemoryError, OSError) as error:  # the engine is as it was
            logger.exception("%s failed", call.method)
            answer = Answer(call.number, error=str(error))
        self._send([])
        self._socket.send_multipart([client, encode_news(News([], self._engine.stats, [answer]))])

    def _take_request(self, client: bytes, message: Add) -> None:
        """Add it, or let it wait until its grammar is parsed: 64 nested objects take 80 ms, which no step waits for."""
        try:
            if self._calls:
                raise AsleepError(f"the engine takes no requests until {self._calls[0][1].method} is done")
            params = unpack(message)
            grammar = self._engine.inputs.parse(params) if isinstance(params, SamplingParams) else None
        except Exception as error:
            self._refuse(client, message, error)
            return
        unparsed = grammar is not None and not futures.wait([grammar], 0 if self._parsing else AT_ONCE).done
        if unparsed or any(one.message.request_id == message.request_id for one in self._parsing):
            self._parsing.append(Parsing(grammar, client, message, params))
        else:
            self._add(client, message, params)

    def _add_parsed(self) -> None:
        """Add the requests whose grammars are parsed to the engine, in the order in which they came."""
        while self._parsing:
            first = self._parsing[0]
            if first.grammar is not None:
                waits = self._engine.has_unfinished_requests() or self._lockstep_engines is not None
                patience = 0 if waits else ONLY_PARSING
                if not futures.wait([first.grammar], patience).done:
                    return
            self._parsing.popleft()
            if self._add(first.client, first.message, first.params) and first.aborted:
                self._send(self._engine.abort_request(first.message.request_id))

    def _add(self, client: bytes, message: Add, params: Params) -> bool:
        """Returns whether the engine took it; else the client has been told why not."""
        try:
            ids = packed_from(message.packed)
            facts = message.cache_salt, ids, message.token_type_ids, message.bad_words
            prompt = TokenizedPrompt(message.prompt, ids, *facts)
            self._engine.add_request(message.request_id, prompt, params, priority=message.priority)
            self._owner[message.request_id] = client
        except Exception as error:
            if not isinstance(error, ValueError | AsleepError):  # else it is not there, or another one of this id is
                self._engine.abort_request(message.request_id)
            self._refuse(client, message, error)
            return False
        return True

    def _refuse(self, client: bytes, message: Add, error: Exception) -> None:
        """Say what is wrong with a request. What it brings out must not end the others'."""
        if isinstance(error, ValueError | AsleepError):
            kind: Literal["asleep", "refused"] = "asleep" if isinstance(error, AsleepError) else "refused"
            update: Update = RequestFailure(message.request_id, str(error), kind)
        else:
            logger.error("request %s could not be taken", message.request_id, exc_info=error)
            update = _without_result(message, f"{type(error).__name__}: {error}")
        self._socket.send_multipart([client, encode_news(News.of([update], self._engine.stats))])

    def _send(self, outputs: Sequence[EngineOutput]) -> None:
        """Give each API process what is its own; without outputs, only what changed of the statistics."""
        stats = self._engine.stats
        if not outputs and stats == self._sent:
            return
        self._sent = stats
        shares: dict[bytes, list[EngineOutput]] = {client: [] for client in self._clients}
        for output in outputs:
            client = self._owner.pop(output.request_id) if output.finished else self._owner[output.request_id]
            leave_prompt(output)
            shares[client].append(output)
        for client, share in shares.items():
            self._socket.send_multipart([client, encode_news(News.of(share, stats))])


def _without_result(message: Add, error: str) -> EngineOutput:
    """The only output of a request that could not be taken, through no fault of its own."""
    if message.pooling is not None:
        return PoolingRequestOutput(message.request_id, PoolingOutput(torch.empty(0)), (), error=error)
    now = time.monotonic()
    metrics = RequestMetrics(arrival_time=now, finished_time=now)
    return RequestOutput(message.request_id, None, (), None, finished=True, metrics=metrics, error=error)
