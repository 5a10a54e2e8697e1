"""The cache's second tier: blocks of keys and values that lie in the host's memory, and their way there and back. No
torch.

A full block that the prefix cache knows is stored here as soon as a step has computed it (as in vLLM's native
offloading), so that eviction from the device costs nothing: the block comes back by a copy instead of by computing.
The same serves preemption. A victim's full blocks are here already, and when it returns it takes those that the device
still has, then those that are here, and computes the rest, which is less than a block. Each block stands for itself, as
in the prefix cache, which this is a part of: what is missing is computed.

Without a prefix cache a block is of use to nobody but the sequence that it is of, and is stored when that is preempted.
Then the sequences of a request are swapped: all of them or none (:mod:`tritonllm.engine.schedule.swaps`).

A connector (:mod:`tritonllm.engine.transfer.transfer`) works on slots, too, in threads of the host. It gets none that a
batch under way reads or writes, and no batch gets one that it has (:meth:`HostTier.lend`,
:meth:`HostTier.take_stored`).

A step that reads loaded blocks waits on the device for the batch that loads them
(:mod:`tritonllm.engine.data.copy_batches`). That would stop everybody. So a request with loads under way is left out of
plans until the host has heard that they are done, and meanwhile the others run (:attr:`HostTier.loading`). Only when
there is nobody else does its step wait on the device. That the host hears late or never makes nothing wrong.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice, takewhile

from tritonllm.engine.data.copy_batches import Fills, Transfers, UnderWay
from tritonllm.engine.data.request import Request
from tritonllm.engine.data.stats import TierStats
from tritonllm.engine.schedule.rates import Rates
from tritonllm.engine.schedule.swaps import Swaps, own_labels


class HostTier:
    """Which block's contents are in which slot of the host's memory; the least recently used one is given up first.

    Args:
        num_slots: blocks that the host's memory holds, at least 1.
        rates: say whether loading pays.

    Attributes:
        done: how many batches are known to have ended.
        loading: running requests that wait for loads, each with the number of the last batch that it waits for.
        tells: somebody asks :meth:`take_stored` what was stored.
        streams: blocks are copied while the step runs that fills them; if not, with the next plan (for measurements).
    """

    def __init__(self, num_slots: int, rates: Rates) -> None:
        if num_slots < 1:
            raise ValueError(f"num_slots must be at least 1, got {num_slots}")
        self.num_slots = num_slots
        self.rates = rates
        self.done = 0
        self.stored = self.loaded = 0
        self.tells, self.streams = False, True
        self._number = 1  # of the batch that is being put together
        self._lent: dict[int, bytes | None] = {}  # slots, and what is known to be in them
        self.reset()

    def reset(self) -> None:
        """Forget everything. What is under way goes on: the next step waits for it."""
        self.loading: dict[Request, int] = {}
        self._slot_of: OrderedDict[bytes, int] = OrderedDict()  # the most recently used one is the last
        self._free: list[int] = []  # taken from the end: neighbours are copied together
        self._forget_slots()
        self._queue: dict[bytes, int] = {}  # blocks to store with the next plan, by label
        self._filled: dict[bytes, int] = {}  # those that the step fills that is being planned
        self._stores: dict[int, tuple[bytes, int]] = {}  # labels and blocks of the next batch, by slot
        self._loads: dict[int, int] = {}  # blocks and the slots that they come from; a block can be given anew
        self._read: set[int] = set()  # slots of those loads
        self._under_way = UnderWay(self._number - 1)  # of batches before this reset nobody knows what they touch
        self._wait = self._number - 1

    def clear(self) -> None:
        """Forget the contents of all slots, while no request runs. What is under way still counts for blocks."""
        self._forget_slots()
        self._queue.clear()
        self._filled.clear()

    def _forget_slots(self) -> None:
        self._lent = dict.fromkeys(self._lent)
        self._free = [slot for slot in reversed(range(self.num_slots)) if slot not in self._lent]
        self._slot_of.clear()
        self._told: list[tuple[bytes, int]] = []  # what was stored since somebody asked
        self._swaps = Swaps()

    @property
    def stats(self) -> TierStats:
        each, used = self.rates.block_bytes, len(self._slot_of)
        return TierStats(self.num_slots, used, self.stored, self.loaded, each * self.stored, each * self.loaded)

    def find(self, labels: Iterable[bytes]) -> list[int]:
        """The slots of the leading blocks with these labels, up to the first that is not here; they are used now."""
        found = list(takewhile(self._slot_of.__contains__, labels))
        for label in reversed(found):  # of a sequence the end goes first: without what is before it, it is of no use
            self._slot_of.move_to_end(label)
        return [self._slot_of[label] for label in found]

    def has(self, label: bytes) -> bool:
        """Whether a slot has, or is about to get, these contents."""
        return label in self._slot_of

    def lend(self, count: int) -> list[int]:
        """Lend at most so many slots to somebody who writes into them, until :meth:`take_back`; in order, because
        blocks that are neighbours here and where they come from are copied together. Half of all slots are never lent.
        Takes time in the number of slots that are lent or that copies touch, not in all."""
        if self.done < self._under_way.unknown:
            return []
        touched = self._stores.keys() | self._read | self._under_way.slots()
        count, slots, passed = max(0, min(count, self._most_lent - len(self._lent))), list[int](), list[int]()
        while self._free and len(slots) < count:
            slot = self._free.pop()
            (passed if slot in touched else slots).append(slot)
        self._free += reversed(passed)
        if len(slots) < count:
            used = ((label, slot) for label, slot in self._slot_of.items() if slot not in touched)
            oldest = list(islice(((label, slot) for label, slot in used if slot not in self._lent), count - len(slots)))
            slots += [slot for _, slot in oldest]
            for label, _ in oldest:
                del self._slot_of[label]
        slots.sort()
        self._lent.update(dict.fromkeys(slots))
        return slots

    def take_stored(self) -> list[tuple[bytes, int]]:
        """Labels and slots of what is stored by the batches that went with plans until now, as far as the last question
        did not tell, for somebody who reads them: they are lent until :meth:`take_back`. With half of all slots lent
        the rest is left out: the first of them, which are the ends of prompts."""
        told, self._told = self._told, []
        there = [(label, slot) for label, slot in told if self._slot_of.get(label) == slot and slot not in self._lent]
        there = there[max(0, len(there) - max(0, self._most_lent - len(self._lent))) :]
        self._lent.update({slot: label for label, slot in there})
        return there

    def take_back(self, slot: int, label: bytes | None = None) -> None:
        """A lent slot is not needed any more.

        Args:
            label: the digest of the block that was written into it; ``None`` if nothing was, or nothing valid.
        """
        if self._lent.pop(slot) is not None:
            return  # it has been read, and is still what it was
        if label is None or label in self._slot_of:
            self._free.append(slot)
        else:
            self._slot_of[label] = slot

    @property
    def last(self) -> int:
        """The number of the last batch that went with a plan; 0 if there was none."""
        return self._number - 1

    @property
    def _most_lent(self) -> int:
        return max(1, self.num_slots // 2)

    def keep(self, label: bytes, block: int, *, fills: bool = False) -> None:
        """Store this block, which a launched step or the one that is being planned computes, with the next plan; if it
        is here already, it is used now.

        Args:
            fills: the step that is being planned computes the last of it. Then it may go with this plan
                (:meth:`fill`).
        """
        if label in self._slot_of:
            self._slot_of.move_to_end(label)
        elif label not in self._queue and label not in self._filled:
            (self._filled if fills else self._queue)[label] = block

    def keep_all(self, blocks: Mapping[bytes, int], *, fills: bool = False) -> None:
        """:meth:`keep` for a sequence of blocks by label, the first one first: the end is given up first."""
        for label in reversed([label for label in blocks if label in self._slot_of]):
            self._slot_of.move_to_end(label)
        for label, block in blocks.items():
            if label not in self._slot_of:
                self.keep(label, block, fills=fills)

    def keep_own(self, requests: Sequence[Request], block_tokens: int) -> None:
        """Store the full blocks of sequences of one user's request that are being preempted together, where no prefix
        cache names them, with this plan: launched steps have computed them, and they are given to others now. Or none
        of them, and give up what siblings left before: if there is no room for all, if a sibling that waits has lost
        what it left, or if this plan's batch loads, too: its stores come first, so they would read what is not there.
        """
        prompts: set[bytes] = set()
        blocks: dict[bytes, int] = {}
        for request in requests:
            prompt, own = own_labels(request, block_tokens)
            computed = min(request.num_computed_tokens, request.num_tokens - 1) // block_tokens
            blocks.update(zip([*prompt, *own][:computed], request.block_ids, strict=False))
            prompts.update(prompt)
        swap = self._swaps.of(requests[0])
        lost = any(swap.lacks(sibling, block_tokens) for sibling in requests[0].siblings)
        room = self.num_slots - len(self._lent)
        if lost or self._loads or len({*swap.labels, *blocks}) > room:
            self._give_up_swap(requests[0])
            return
        for label in (*swap.labels, *blocks):  # used now: others are given up for the new ones
            if label in self._slot_of:
                self._slot_of.move_to_end(label)
        self._store_all(blocks)
        own = [label for label in blocks if label not in prompts]
        self._swaps.leave(requests[0], [label for label in blocks if label in prompts], own)

    def find_own(self, request: Request, block_tokens: int, there: int) -> list[int]:
        """The slots of what a request that comes back has left here, behind the first blocks, which are there.

        None if computing is sooner done than copying all that it and its siblings have left. The first of them that
        comes back decides that for all.
        """
        prompt, own = own_labels(request, block_tokens)
        slots, swap = self.find([*prompt, *own][there:]), self._swaps.of(request)
        others = len(swap.own.keys() - own)
        if not swap.returns and not self.rates.pays(len(slots) + others):
            self._give_up_swap(request)
            return []
        self._swaps.come_back(request, own)
        for label in own:  # nobody will ask for these again: they are given up first
            if label in self._slot_of:
                self._slot_of.move_to_end(label, last=False)
        return slots

    def begin(self) -> None:
        """A plan is being made. Its batch stores what has been kept until now."""
        self._under_way.end(self.done)
        queue, self._queue = self._queue, {}
        self._store_all(queue)
        self._let_go(self.done)

    def hurry(self, running: Sequence[Request]) -> bool:
        """A step would be empty: let it wait for the loads of the first of these requests, from whom nobody behind can
        take blocks. False if there are none, or if one of them goes on as soon as a token in flight is known."""
        if not self.loading or any(request.num_pending_tokens for request in running):
            return False
        self._let_go(next(self.loading[request] for request in running if request in self.loading))
        return True

    def bring(self, request: Request, there: Sequence[int], slots: Sequence[int], blocks: Sequence[int]) -> None:
        """Give a request that begins to run its blocks' contents.

        Args:
            there: blocks that it shares; some may still be on their way.
            slots: what comes back from here, found a moment ago.
            blocks: the request's new blocks, of which the first take what comes back.
        """
        self.overwrite(blocks)
        last = self._under_way.last_load(there)
        for slot, block in zip(slots, blocks, strict=False):
            self._loads[block] = slot
            self._read.add(slot)
            last = self._number
            self._under_way.load(block, last)
        if last > self.done:
            self.loading[request] = last

    def overwrite(self, blocks: Sequence[int]) -> None:
        """The step that is being planned, or its loads, may write into these blocks."""
        self._wait = max(self._wait, self._under_way.last_of(blocks))

    def delays(self, request: Request) -> bool:
        """A sibling waits for the prompt that both begin with: better fork from it than load or compute it twice."""
        return not request.output_token_ids and any(sibling in self.loading for sibling in request.siblings)

    def finish(self, runs: bool) -> Transfers | None:
        """The plan is made. Returns what goes with it.

        Args:
            runs: whether there is a step; without one the batch is left for the next plan.
        """
        wait, stores = self._wait, [(block, slot) for slot, (_, block) in self._stores.items()]
        loads = [(slot, block) for block, slot in self._loads.items()]
        if not runs or not (wait or stores or loads):
            return None
        transfers = Transfers(self._number if stores or loads else 0, tuple(stores), tuple(loads), wait)
        if stores or loads:
            self._issue(stores, loads)
        self._wait = 0
        return transfers

    def fill(self, beside: bool) -> Fills | None:
        """The plan is made, and :meth:`finish` has said what goes before its step. Returns what is copied meanwhile.

        Args:
            beside: whether blocks can be copied while the step runs. Else those that it fills are stored with the next
                plan.
        """
        filled, self._filled = self._filled, {}
        if not (beside and self.streams):
            self._queue.update(filled)
            return None
        self._store_all(filled)  # what a batch before it reads or writes may be overwritten
        stores = [(block, slot) for slot, (_, block) in self._stores.items()]
        if not stores:
            return None
        fills = Fills(self._number, tuple(stores))
        self._issue(stores, [])
        return fills

    def _issue(self, stores: Sequence[tuple[int, int]], loads: Sequence[tuple[int, int]]) -> None:
        """The batch that was put together goes with a plan."""
        self._under_way.issue(self._number, stores, loads)
        self._number += 1
        self.stored += len(stores)
        self.loaded += len(loads)
        if self.tells:
            self._told += [(label, slot) for slot, (label, _) in self._stores.items()]
        self._stores, self._loads = {}, {}
        self._read.clear()

    def _let_go(self, number: int) -> None:
        """Let those run who wait for batches up to this one. The device waits for them, which takes no time if they
        have ended."""
        for request, last in list(self.loading.items()):
            if last <= number:
                del self.loading[request]
                self._wait = max(self._wait, last)

    def _store_all(self, blocks: dict[bytes, int]) -> None:
        """Blocks by label, the first of a sequence first. It is stored last, so that the end is given up first; free
        slots are in the order of the blocks all the same."""
        new = min(sum(label not in self._slot_of for label in blocks), len(self._free))
        self._free[len(self._free) - new :] = reversed(self._free[len(self._free) - new :])
        for label, block in reversed(blocks.items()):
            self._store(label, block)

    def _store(self, label: bytes, block: int) -> None:
        if label in self._slot_of:
            self._slot_of.move_to_end(label)
            return
        if self._free:
            slot = self._free.pop()
        else:
            oldest = self._oldest()
            if oldest is None:
                return
            slot = self._give_up(oldest)
        self._slot_of[label] = slot
        self._stores[slot] = label, block  # in the place of another one of this batch, which the slot was given first
        self._under_way.store(block, self._number)

    def _oldest(self) -> bytes | None:
        """The block that is given up next. What is lent must stay: it counts as used now, or each look would pass all
        of it again. What a load of this batch reads must stay, too, for stores come before loads."""
        lent, oldest = [], None
        for label, slot in self._slot_of.items():
            if slot in self._lent:
                lent.append(label)
            elif slot not in self._read:
                oldest = label
                break
        for label in lent:
            self._slot_of.move_to_end(label)
        return oldest

    def _give_up(self, label: bytes) -> int:
        """Forget this block, and those that are of no use without it; returns its slot."""
        self._free += [self._slot_of.pop(other) for other in self._swaps.broken_by(label)]
        return self._slot_of.pop(label)

    def _give_up_swap(self, request: Request) -> None:
        self._free += [self._slot_of.pop(label) for label in self._swaps.forget(request)]
