"""Brings blocks that others have computed into the cache's tier in the host's memory before a request is scheduled, and
hands what the tier stores to others. No torch.

A connector (:mod:`tritonllm.engine.transfer.connector`) moves blocks between the slots of the host's tier and wherever
it keeps them; between the tier and the device they move as they always do (:mod:`tritonllm.engine.schedule.host_tier`).
So the scheduler knows nothing of connectors: when it admits a request, the tier has more blocks of its prompt than it
had.

A request whose first missing blocks may be had waits outside of the scheduler, like one whose grammar is being compiled
(:mod:`tritonllm.engine.loop.readiness`), through two questions: how many are there, and bring them. It goes on when
they are there, when some of them failed to come, or after ``timeout`` seconds, whatever the connector does; what is not
there by then is computed. While an answer is overdue nothing else is asked: a connector that hangs delays only those
who asked before that.

Slots that a connector works on are lent: the tier neither gives them to another block nor counts on their contents
until they come back, however late that is.

Keys. The prefix cache's digest says which tokens a block is of, and a fingerprint of the model
(:mod:`tritonllm.engine.transfer.fingerprint`) what computed it. Both are hashed into the key. So blocks of another
model, dtype or layout have other keys and are never found. Tokenizers need no mention: digests are of token ids.
"""

import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

from xxhash import xxh3_128_digest

from tritonllm.config.kv_transfer import KVTransferConfig
from tritonllm.engine.data.copy_batches import Transfers
from tritonllm.engine.data.request import Request
from tritonllm.engine.schedule.host_tier import HostTier
from tritonllm.engine.schedule.prefix_cache import PrefixCache
from tritonllm.engine.transfer.connector import KVConnector, Offering, Params

logger = logging.getLogger(__name__)


class Copies(Protocol):
    """:class:`~tritonllm.engine.cache.host_copies.HostCopies`, which says what the methods do."""

    def run(self, transfers: Transfers) -> None: ...

    def ending(self, number: int) -> Callable[[], bool]: ...


class TransferStats(NamedTuple):
    """Blocks that were computed here and handed out, that were brought in, and that were asked for in vain although
    they should have been there."""

    kv_saved_blocks: int = 0
    kv_fetched_blocks: int = 0
    kv_missed_blocks: int = 0


class Fetch:
    """The transfer of blocks that a request waits for.

    Attributes:
        labels: the digests of the request's first blocks that this engine does not have.
        params: the request's ``kv_transfer_params``, which say where the blocks are.
        deadline: when it goes on without, by ``time.monotonic``.
        done: whether the request may go on.
        future: the connector's answer to what it was asked last; ``None`` before it was asked, and while there is no
            free slot.
        slots: the slots that are lent for these blocks, once it is known how many there are.
    """

    def __init__(self, labels: Sequence[bytes], params: Params, deadline: float) -> None:
        self.labels, self.params, self.deadline = labels, params, deadline
        self.keys: Sequence[bytes] = ()
        self.count = 0  # of blocks that may be had
        self.done = False
        self.current = True  # the weights have not changed since
        self.future: Future[Any] | None = None
        self.slots: list[int] = []


class KVTransfer:
    """The engine's side of a connector. All methods are for the engine's thread.

    Args:
        connector: the connector, which has the tier's memory.
        config: the configuration of the connector, which says its roles.
        tier: the tier in the host's memory, which lends slots.
        cache: the prefix cache, which names blocks.
        fingerprint: says which model computes them, and with which weights now.
        timeout: how long a request waits at most, in seconds.
    """

    def __init__(
        self,
        connector: KVConnector,
        config: KVTransferConfig,
        tier: HostTier,
        cache: PrefixCache,
        fingerprint: Callable[[], bytes],
        timeout: float,
    ) -> None:
        self.connector = connector
        self._config, self._tier, self._cache = config, tier, cache
        self._identify, self._timeout = fingerprint, timeout
        self._fingerprint = fingerprint()
        self._answers: SimpleQueue[Callable[[], None]] = SimpleQueue()  # what is to be done in the engine's thread
        self._asking: list[Fetch] = []  # that wait for an answer or for slots, in order of arrival
        self._overdue: set[Fetch] = set()
        self._saving = 0  # questions that are not answered
        self._brought: set[bytes] = set()  # labels of blocks that others have computed; some may be gone again
        self._saved = self._fetched = self._missed = 0
        tier.tells = config.saves
        weakref.finalize(self, _close, connector, threading.current_thread())

    @property
    def stats(self) -> TransferStats:
        self._take_answers()
        return TransferStats(self._saved, self._fetched, self._missed)

    @property
    def is_saving(self) -> bool:
        """Blocks are being handed out, so that :attr:`stats` will change although no step is made."""
        return self._saving > 0

    def fetch(self, request: Request, params: Params, now: float) -> Fetch | None:
        """Begin to bring blocks of a request that is not scheduled yet; ``None`` if it need not wait for any."""
        if not self._config.loads or self._overdue:
            return None
        labels = self._cache.labels(request)
        have = len(self._cache.match(request))
        while have < len(labels) and self._tier.has(labels[have]):
            have += 1
        if have == len(labels):
            return None
        fetch = Fetch(labels[have:], params, now + self._timeout)
        self._brought.difference_update(fetch.labels)  # they are gone, and may be computed here now
        fetch.keys = [self._key(label) for label in fetch.labels]
        self._asking.append(fetch)
        self._ask(fetch, self.connector.lookup(fetch.keys, params), self._found)
        return fetch

    def offer(self, params: Params) -> Params | None:
        """What the answer says of where this engine's blocks are, if the request asks for that
        (``{"do_remote_decode": true}``) and others can have them."""
        asks = params.get("do_remote_decode") is True and self._config.saves
        return self.connector.offer() if asks and isinstance(self.connector, Offering) else None

    def follow(self, now: float) -> None:
        """Take in what the connector has answered since, and let those go on who waited too long."""
        self._take_answers()
        for fetch in [one for one in self._asking if now >= one.deadline]:
            self._asking.remove(fetch)
            fetch.done = True
            if fetch.future is not None:
                if not self._overdue:
                    logger.warning(
                        "the KV connector has not answered within %.3g s where %d blocks of a prompt are: until it "
                        "does, prompts are computed without it",
                        self._timeout,
                        len(fetch.keys),
                    )
                self._overdue.add(fetch)
        for fetch in self._asking:
            if fetch.count and not fetch.slots and not self._load(fetch):
                break  # they have waited longer than those behind

    def after_step(self, copies: Copies | None, idle: bool, now: float) -> None:
        """Hand out what is stored with the step that was launched.

        Args:
            copies: the copies between the device and the tier.
            idle: whether nobody runs, so that perhaps no step follows: what none has stored yet is stored now.
        """
        assert copies is not None  # there is a tier
        self.follow(now)
        if idle:
            self._tier.begin()
            rest = self._tier.finish(runs=True)
            if rest is not None:
                copies.run(rest)
        self._save(copies.ending(self._tier.last))

    def rename(self) -> None:
        """The weights may have changed: what is on its way was computed with those before."""
        self._fingerprint = self._identify()
        self._brought.clear()
        for fetch in (*self._asking, *self._overdue):
            fetch.current = False

    def reset(self) -> None:
        """No request waits any more. What is under way comes back late."""
        for fetch in self._asking:
            if fetch.future is not None:
                self._overdue.add(fetch)
        self._asking.clear()

    def _take_answers(self) -> None:
        while not self._answers.empty():
            self._answers.get()()

    def _key(self, label: bytes) -> bytes:
        return xxh3_128_digest(self._fingerprint + label)

    def _ask(self, fetch: Fetch, future: "Future[Any]", then: Callable[[Fetch, Any], None]) -> None:
        fetch.future = future

        def answered(done: "Future[Any]") -> None:
            self._answers.put(lambda: then(fetch, result_of(done)))

        future.add_done_callback(answered)

    def _found(self, fetch: Fetch, count: int | None) -> None:
        """Take the answer of how many of a request's blocks may be had."""
        fetch.future = None
        self._overdue.discard(fetch)
        fetch.count = min(count or 0, len(fetch.keys))
        if self._config.asks_named and fetch.params.get("remote_host") is not None:
            self._missed += len(fetch.keys) - fetch.count  # the request says that they are there
        if not fetch.count:
            self._go_on(fetch)

    def _load(self, fetch: Fetch) -> bool:
        """Ask for its blocks, as far as there are slots; false if there are none now."""
        fetch.slots = self._tier.lend(fetch.count)
        if fetch.slots:
            count = len(fetch.slots)
            self._ask(fetch, self.connector.load(fetch.keys[:count], fetch.slots, fetch.params), self._came)
        return bool(fetch.slots)

    def _came(self, fetch: Fetch, there: Sequence[bool] | None) -> None:
        """Take the answer of a transfer, whose blocks have come or will not come, and let its request go on."""
        fetch.future = None
        self._overdue.discard(fetch)
        there = there or [False] * len(fetch.slots)
        for label, slot, came in reversed([*zip(fetch.labels, fetch.slots, there, strict=False)]):
            good = came and fetch.current
            self._tier.take_back(slot, label if good else None)
            if good:
                self._brought.add(label)
            self._fetched += good
            self._missed += not came
        self._limit_brought()
        self._go_on(fetch)

    def _limit_brought(self) -> None:
        """Forget those that are gone, before they are many."""
        pool = self._cache.pool
        if len(self._brought) > 2 * (self._tier.num_slots + pool.num_blocks):
            self._brought = {one for one in self._brought if self._tier.has(one) or pool.find_leading([one])}

    def _go_on(self, fetch: Fetch) -> None:
        fetch.done = True
        if fetch in self._asking:
            self._asking.remove(fetch)

    def _save(self, ready: Callable[[], bool]) -> None:
        stored = self._tier.take_stored()
        for brought in (False, True):  # those that the tier had given up, and has from the device again, do not count
            some = [(label, slot) for label, slot in stored if (label in self._brought) == brought]
            if some:
                self._hand_out(some, ready, counts=not brought)

    def _hand_out(self, stored: Sequence[tuple[bytes, int]], ready: Callable[[], bool], counts: bool) -> None:
        keys, slots = [self._key(label) for label, _ in stored], [slot for _, slot in stored]
        self._saving += 1

        def was_saved(done: "Future[int]") -> None:
            self._saving -= 1
            for slot in slots:
                self._tier.take_back(slot)
            self._saved += (result_of(done) or 0) if counts else 0

        future = self.connector.save(keys, slots, ready)
        future.add_done_callback(lambda done: self._answers.put(lambda: was_saved(done)))


def result_of(done: "Future[Any]") -> Any:
    """What a connector has answered; ``None`` if it failed, which it should not."""
    error = None if done.cancelled() else done.exception()
    if error is not None:
        logger.warning("the KV connector failed; its blocks are computed", exc_info=error)
    return None if done.cancelled() or error is not None else done.result()


def _close(connector: KVConnector, engine_thread: threading.Thread) -> None:
    """Close the connector of an engine that is gone.

    Garbage is found in any thread. In one of the connector's own, which would wait for itself, or for a lock that it
    holds, the work goes to a new thread; that of the engine, and the one in which Python ends, wait until it is done.
    """
    if threading.current_thread() in (engine_thread, threading.main_thread()):
        connector.close()
    else:
        threading.Thread(target=connector.close, name="kv-close").start()
