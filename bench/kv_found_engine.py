"""One of the two engines of ``bench.kv_found``: what each of them is told to do, in a process of its own."""

import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, cast

import torch

from bench.kv_layers import BLOCK_SIZE
from tritonllm import LLM, SamplingParams
from tritonllm.engine.data.request import Request
from tritonllm.engine.transfer.connector import KVConnector, Params
from tritonllm.engine.transfer.tensor_digest import digest_of

PATIENCE = 300.0  # seconds without an answer
ENDS_WITHIN = 20.0  # seconds, once it is told to
SETTLES = 60.0  # seconds until copies have arrived
NEW = 8  # tokens behind a prefix that nobody has computed: less than a block


class Place(NamedTuple):
    """Where an engine runs, and how.

    Attributes:
        gpu: its number; ``None``: the CPU.
        arguments: of ``LLM``.
    """

    gpu: int | None
    arguments: dict[str, Any]


class Computed(NamedTuple):
    """What the engine says that has computed a prefix.

    Attributes:
        params: where its blocks are (``kv_transfer_params``), if a request has to say that.
        token: behind the prefix and ``NEW`` tokens.
        digest: of the prefix's blocks in its GPU's memory.
    """

    params: Params
    token: int
    digest: bytes


class Answer(NamedTuple):
    """What a request took.

    Attributes:
        seconds: until its first token.
        cached: tokens that were not computed.
        load_seconds: what of it the connector took to bring blocks, and how many these were.
    """

    seconds: float
    token: int
    cached: int
    load_seconds: float
    loaded: int


def prompt_of(tokens: int, seed: int) -> list[int]:
    """A prefix of so many tokens and ``NEW`` more, which both engines know by its seed. No two begin alike."""
    generator = torch.Generator().manual_seed(1000 * tokens + seed)
    return torch.randint(1, 256, (tokens + NEW,), generator=generator).tolist()


class Loads:
    """Sees how long a connector's loads take."""

    def __init__(self, connector: KVConnector) -> None:
        self.seconds, self.blocks = 0.0, 0
        self._load = connector.load
        connector.load = self._timed  # type: ignore[method-assign]

    def _timed(self, keys: Sequence[bytes], slots: Sequence[int], params: Params) -> "Future[list[bool]]":
        begin = time.perf_counter()
        future = self._load(keys, slots, params)

        def ended(done: "Future[list[bool]]") -> None:
            self.seconds += time.perf_counter() - begin
            self.blocks += sum(done.result())

        future.add_done_callback(ended)
        return future


class Side:
    """An engine. Each method answers what the other process asks."""

    def __init__(self, place: Place) -> None:
        begin = time.perf_counter()
        if place.gpu is not None:
            torch.cuda.set_device(place.gpu)
        self._llm = LLM(**place.arguments)
        self.start_seconds = time.perf_counter() - begin
        self._engine = cast(Any, self._llm.engine)  # what is looked at is private
        self._transfer = self._engine._transfer
        self._tier = self._engine._scheduler.tier
        if place.gpu is None:
            self._tier.rates.pays = lambda blocks: True  # a model of this size is computed sooner
        self._loads = Loads(self._transfer.connector)

    def facts(self) -> dict[str, Any]:
        """The fingerprint of its weights, and the seconds that this and the start took."""
        begin = time.perf_counter()
        fingerprint = self._transfer._identify()
        seconds = time.perf_counter() - begin
        block_bytes = self._engine._runner.block_bytes
        facts = {"fingerprint": fingerprint, "fingerprint_seconds": seconds, "block_bytes": block_bytes}
        return facts | {"start_seconds": self.start_seconds}

    def compute(self, tokens: int, seed: int) -> Computed:
        """Compute a prefix; answer when all of its blocks have been saved.

        Raises:
            RuntimeError: they are not.
        """
        prompt = prompt_of(tokens, seed)
        wanted = self._engine.stats.kv_saved_blocks + tokens // BLOCK_SIZE
        (output,) = self._generate(prompt[:tokens], {"do_remote_decode": True})
        until = time.monotonic() + PATIENCE
        while self._engine.stats.kv_saved_blocks < wanted:
            self._engine.step()  # takes in what the connector has answered
            if time.monotonic() > until:
                lost = wanted - self._engine.stats.kv_saved_blocks
                raise RuntimeError(f"{lost} of {tokens // BLOCK_SIZE} blocks were not saved: no result")
            time.sleep(1e-3)
        (same,) = self._generate(prompt, {})
        if same.num_cached_tokens != tokens:
            raise RuntimeError(f"the engine that computed {tokens} tokens has {same.num_cached_tokens}: no result")
        return Computed(output.kv_transfer_params or {}, same.outputs[0].token_ids[0], self.digest(tokens, seed))

    def ask(self, tokens: int, seed: int, params: Params) -> Answer:
        """The first token behind a prefix and ``NEW`` tokens."""
        prompt = prompt_of(tokens, seed)
        self._settle()
        self._loads.seconds, self._loads.blocks = 0.0, 0
        begin = time.perf_counter()
        (output,) = self._generate(prompt, params)
        seconds = time.perf_counter() - begin
        (token,) = output.outputs[0].token_ids
        return Answer(seconds, token, output.num_cached_tokens or 0, self._loads.seconds, self._loads.blocks)

    def forget(self) -> None:
        """Nothing is cached here any more, on the GPU or in the tier.

        Raises:
            RuntimeError: a request runs.
        """
        until = time.monotonic() + SETTLES
        while not self._engine.reset_prefix_cache():  # a step that was launched ahead still runs
            self._engine.step()
            if time.monotonic() > until:
                raise RuntimeError("the prefix cache cannot be reset: no result")

    def digest(self, tokens: int, seed: int) -> bytes:
        """Of the blocks of a prefix that are in the GPU's cache, byte by byte.

        Raises:
            RuntimeError: some are not.
        """
        scheduler = self._engine._scheduler
        request = Request("digest", prompt_of(tokens, seed), SamplingParams(), max_total_tokens=tokens + NEW)
        blocks = scheduler.prefix_cache.match(request)
        if len(blocks) != tokens // BLOCK_SIZE:
            raise RuntimeError(f"{len(blocks)} of {tokens // BLOCK_SIZE} blocks are in the cache: no result")
        pools = [copies.pool for copies in self._engine._runner.caches.copies]
        return digest_of(pool[:, :, blocks[at : at + 64]] for pool in pools for at in range(0, len(blocks), 64))

    def _generate(self, prompt: list[int], wish: Params) -> Any:
        extra = {"kv_transfer_params": dict(wish)} if wish else None
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False, extra_args=extra)
        return self._llm.generate([prompt], params, use_tqdm=False)

    def _settle(self) -> None:
        """Until no copy between cache and tier is under way, and nobody works on the tier's slots."""
        until = time.monotonic() + SETTLES
        while self._engine._runner.host.done < self._tier.last or self._tier._lent:
            self._engine.step()
            if time.monotonic() > until:
                raise RuntimeError("the copies to the tier do not end: no result")


def serve(place: Place, pipe: Connection) -> None:
    """A process's work: start an engine, and answer until the other side hangs up. What goes wrong is told there."""
    with suppress(EOFError, BrokenPipeError):
        side = answered(pipe, lambda: Side(place))
        if side is None:
            return
        answered(pipe, side.facts)
        while True:
            name, arguments = pipe.recv()
            answered(pipe, partial(getattr(side, name), *arguments))


def answered(pipe: Connection, work: Callable[[], Any]) -> Any:
    """What was done, which the other side is told; ``None`` if it has failed."""
    try:
        result = work()
    except Exception as error:  # told to the parent, which raises it
        pipe.send(("failed", f"{type(error).__name__}: {error}"))
        return None
    pipe.send(("done", None if isinstance(result, Side) else result))
    return result


class Remote:
    """A :class:`Side` in a process of its own.

    Attributes:
        facts: what it said when it had started; after :meth:`wait`.
    """

    def __init__(self, place: Place) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        # not a daemon: on a GPU an engine has children of its own, which compile
        self._process = context.Process(target=serve, args=(place, other))
        self._process.start()
        other.close()
        self.facts: dict[str, Any] = {}

    def wait(self) -> None:
        """Until it has started."""
        self._heard()
        self.facts = self._heard()

    def compute(self, tokens: int, seed: int) -> Computed:
        computed: Computed = self._call("compute", tokens, seed)
        return computed

    def ask(self, tokens: int, seed: int, params: Params) -> Answer:
        answer: Answer = self._call("ask", tokens, seed, params)
        return answer

    def forget(self) -> None:
        self._call("forget")

    def digest(self, tokens: int, seed: int) -> bytes:
        digest: bytes = self._call("digest", tokens, seed)
        return digest

    def hang_up(self) -> None:
        """It ends when it has read what was said."""
        self._pipe.close()

    def end(self) -> None:
        self.hang_up()
        self._process.join(ENDS_WITHIN)
        self._process.kill()
        self._process.join()

    def _call(self, name: str, *arguments: Any) -> Any:
        try:
            self._pipe.send((name, arguments))
        except OSError as error:
            raise RuntimeError("a process has ended, or was given up") from error
        return self._heard()

    def _heard(self) -> Any:
        """Raises:
        RuntimeError: the process has failed, or hangs.
        """
        try:
            if not self._pipe.poll(PATIENCE):
                self.hang_up()  # a late answer must not be taken for that of another question
                raise RuntimeError(f"a process has said nothing for {PATIENCE:.0f} s")
            kind, value = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise RuntimeError("a process has ended without a word") from error
        if kind == "failed":
            raise RuntimeError(value)
        return value
