"""Decides what runs in each step: host-only bookkeeping over one token budget and one pool of blocks. No torch.
What happens to a request that begins, gives way or ends is in :mod:`tritonllm.engine.schedule.scheduled_requests`.

A policy (:mod:`tritonllm.engine.schedule.policy`) gives each request a rank and with it a sort key
(:attr:`Request.order`): rank, then arrival. ``fcfs`` gives all the same rank, ``priority`` the user's number, and here
a lower rank is called a higher priority. ``_running`` is sorted by it and ``_waiting`` is a heap over it, so there is
one algorithm for all. A step serves the running requests in that order, then admits waiting ones while tokens, seats
and blocks last; the first that does not fit ends that, nobody overtakes. If the policy preempts, one that waits with a
higher priority than some that run comes before these. Decodes and prefill chunks differ only in how many tokens they
have left to compute (stall-free batching: Agrawal et al., "Sarathi-Serve", OSDI 2024).

The host may plan a step while the one before still runs. A request whose last token is still on the device is then
planned with it all the same: where it goes is known, only what it is the device fills in (``num_pending_tokens``).
What ends with the token in flight by its length is not planned again; nor is what the host must see that token of
first (:mod:`tritonllm.engine.data.control`), until the results are in; what turns out to have ended otherwise has
computed one token in vain.

With drafts only the device knows how many tokens a step in flight brings: one, or up to so many more as it had drafts.
A request is then planned from the least position that it can have (``num_computed_tokens``) and gets blocks for the
most (``num_possible_tokens`` beyond), but none beyond its longest length: the device knows its true position, stores
nothing beyond, and what it computes there is dropped. The host learns the number with the results, one step later.

When a running request cannot get a block, the last one in order, possibly itself, is preempted: it gives back its
blocks and waits again, to be computed anew (recomputation: Kwon et al., "PagedAttention", SOSP 2023); what the prefix
cache still holds of it by then is not lost. A waiting request takes no seat and no block from a running one of its own
priority; those of lower priority are preempted for it, if that is enough (:mod:`tritonllm.engine.schedule.giving_way`).
The sequences of one user's request come and go together (:mod:`tritonllm.engine.schedule.gang`).

Without ``enable_chunked_prefill`` no prompt is cut: one that does not fit into what a step has left waits for a step
that it fits into, and nobody overtakes it. There is one, at the latest when those before it have ended: a step holds
``max_model_len`` tokens.

Why every request ends:

- Requests are served and admitted from the front and preempted from the back, so a victim is not in the step's plan:
  a planned request never loses its blocks, and the front one is never a victim. For if the front one is alone, it has
  the pool to itself, and no sequence may outgrow the pool: a prompt that does not fit with one more token is refused
  by :meth:`Scheduler.check`, and an output that fills the last slot ends there with reason ``length``.
- So while anything runs, the front request computes at least one token per step (or waits for the token in flight that
  it ends with), and keeps it unless an earlier one in order is admitted. That one is preempted itself only for others
  that are before it. Hence without new arrivals the front request ends.
- Of one priority those that run are before those that wait, and those that wait are admitted in order. So nothing
  overtakes within a priority, but a stream of higher ones that never ends can keep a lower one from running: what ranks
  such a stream may get is for the policy to say.
- If nothing runs, all blocks are free and the first waiting request fits.
- A running request whose blocks are on their way from the host's memory (:mod:`tritonllm.engine.schedule.host_tier`) is
  left out of plans like one that waits for its last token. If nobody else runs, the device waits for them instead.

A step that preempted admits nobody whose priority is not higher than that of all victims, so that a newcomer
(:mod:`tritonllm.engine.schedule.admission`) is not preempted at once, and no victim comes back before those that it
gave way to.
"""

from collections.abc import Sequence
from dataclasses import replace

from tritonllm.config.engine import SchedulerConfig
from tritonllm.engine.data.control import MOST_FORCED
from tritonllm.engine.data.plan import NewTokens, Outline, ScheduledRequest, SchedulerStats, StepPlan
from tritonllm.engine.data.request import Request, RequestStatus
from tritonllm.engine.data.stats import TierStats
from tritonllm.engine.schedule.admission import Admission, Demand
from tritonllm.engine.schedule.block_pool import BlockPool
from tritonllm.engine.schedule.endings import cut
from tritonllm.engine.schedule.gang import fork, last_gang, parent_in
from tritonllm.engine.schedule.giving_way import first_behind, most_blocks, who_gives_way
from tritonllm.engine.schedule.host_tier import HostTier
from tritonllm.engine.schedule.micro_batches import MicroBatches
from tritonllm.engine.schedule.policy import SchedulingPolicy, policy_of, rank_of
from tritonllm.engine.schedule.prefix_cache import PrefixCache
from tritonllm.engine.schedule.prompt_budget import PromptShare
from tritonllm.engine.schedule.scheduled_requests import ScheduledRequests
from tritonllm.engine.schedule.speculation import Drafting
from tritonllm.events import AdmissionEnd

_A_BLOCK = Demand((), 1)  # is left for a sequence that forks


class Scheduler:
    """Owns the unfinished requests and the block pool. Call ``schedule``, run the plan, call ``update``.

    Plans are run and updated in the order in which they were made; the next one may be made before the update.

    Args:
        config: limits of a step and the policy.
        block_tokens: tokens of a block, over all ranks that have some of its keys (``EngineConfig.block_tokens``).
        num_blocks: blocks in the pool.
        max_model_len: most tokens of prompt and output together.
        drafting: says how many drafts each request has in a step of its last token, as far as tokens and lengths allow.
        tier: where blocks are kept in the host's memory; ``None`` for nowhere.
        stages: how many stages the pipeline has: so many plans run before the first of them is drawn.
        enable_prefix_caching: whether the blocks of prompts seen before are reused.
        policy: the order of requests; by default the one that ``config`` names.

    Attributes:
        admission_end: why the last plan took no more of those that wait.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        block_tokens: int,
        num_blocks: int,
        max_model_len: int,
        drafting: Drafting | None = None,
        tier: HostTier | None = None,
        stages: int = 1,
        *,
        enable_prefix_caching: bool = True,
        policy: SchedulingPolicy | None = None,
    ) -> None:
        if max_model_len < 1:
            raise ValueError(f"max_model_len must be at least 1, got {max_model_len}")
        self.config, self.policy = config, policy or policy_of(config)
        self.block_tokens = block_tokens
        self.max_model_len = max_model_len
        self._drafting = drafting or Drafting()
        beyond = 2 * self._drafting.most + MOST_FORCED  # one more token
        self._most_new_blocks = 1 + -(-beyond // block_tokens)  # of a running request in a step
        self.tier = tier
        self._micro_batches = MicroBatches(stages)
        self.pool = BlockPool(num_blocks)
        self.prefix_cache = PrefixCache(block_tokens, self.pool, tier) if enable_prefix_caching else None
        # A sequence can fill every slot and then sample one more token, which itself needs no slot any more.
        self._longest = num_blocks * block_tokens + 1
        keeps_own = self.prefix_cache is None
        self._requests = ScheduledRequests(config.max_num_seqs, self.pool, block_tokens, tier, keeps_own)
        self._forget_requests()

    def _forget_requests(self) -> None:
        self._admission = Admission(self.pool, self.block_tokens, self.prefix_cache, self.tier)
        self._requests.reset(self.pool)
        self._waiting, self._running = self._requests.waiting, self._requests.running
        self._just_ended = self._requests.just_ended
        self._copies: list[tuple[int, int]] = []  # of the step that is being planned
        self._prompts = self._new_share()  # of that step
        self.admission_end: AdmissionEnd = "queue"

    def reset(self) -> None:
        """Begin anew, with no request, all blocks free and nothing cached. Only totals stay, and admission numbers go
        on, since the runner knows seats by them."""
        evictions, self.pool = self.pool.evictions, BlockPool(self.pool.num_blocks)
        self.pool.evictions = evictions
        if self.prefix_cache is not None:
            self.prefix_cache.move_to(self.pool)
        if self.tier is not None:
            self.tier.reset()
        self._forget_requests()

    @property
    def num_waiting(self) -> int:
        """Requests that wait, the preempted ones included."""
        return len(self._waiting)

    @property
    def running(self) -> Sequence[Request]:
        """The running requests, in the order in which they are scheduled."""
        return self._running

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def prompt_share(self) -> int | None:
        """Most tokens of prompts that the last plan could take; ``None`` if no prompt asked."""
        return self._prompts.granted

    @property
    def stats(self) -> SchedulerStats:
        cache = self.prefix_cache
        return SchedulerStats(
            prefix_cache_query_tokens=cache.queries if cache else 0,
            prefix_cache_hit_tokens=cache.hits if cache else 0,
            preemptions=self._requests.preemptions,
            num_blocks=self.pool.num_blocks,
            num_free_blocks=self.pool.num_free,
            tier=TierStats() if self.tier is None else self.tier.stats,
        )

    def check(self, request: Request) -> None:
        """Whether :meth:`add` would take the request.

        Raises:
            ValueError: an id in use, a request that has run before, an empty prompt, limits that contradict each
                other, a prompt that does not fit the pool, or one that the policy has no rank for.
        """
        if request.request_id in self._requests:
            raise ValueError(f"request_id {request.request_id!r} is in use by an unfinished request")
        request.check(self.max_model_len)
        self._admission.check(request)
        if request.rank is None:
            request.rank = rank_of(self.policy, request)

    def add(self, request: Request) -> None:
        """Queue a request; see :meth:`check` for what is refused."""
        self.check(request)
        request.length_limit = min(request.max_total_tokens, self._longest)
        request.ends = frozenset() if request.params.ignore_eos else request.eos_token_ids
        request.ends = request.ends.union(request.params.stop_token_ids or ())
        request.watched = request.params.repetition_detection is not None
        self._drafting.begin(request)
        assert request.rank is not None  # it was checked
        self._requests.add(request, request.rank)

    def fork(self, parent: Request, child: Request) -> None:
        """Let a running request go on from where a running sibling is, in the place of what it had itself."""
        self._requests.fork(parent, child)

    def abort(self, request_id: str) -> Request | None:
        """End a request in whatever state and free its blocks at once; ``None`` if no such request is unfinished."""
        return self._requests.abort(request_id)

    def finish(
        self, request_id: str, status: RequestStatus, stop_reason: int | str | None = None, *, drop: int = 0
    ) -> None:
        """End a request for a reason that only the engine sees; see :meth:`ScheduledRequests.finish`."""
        self._requests.finish(request_id, status, stop_reason, drop)

    def schedule(self) -> StepPlan:
        """Plan one step, which the caller must run: its tokens count as computed from now on.

        It holds at least one token if any request is unfinished and no step is in flight. Takes time in its number of
        requests and new blocks (and the cached blocks of the first request that has to wait), not in their lengths.
        """
        tier = self.tier
        if tier is not None:
            tier.begin()
        step = Outline(self.config.max_num_batched_tokens, self._preempt_gangs())
        scheduled = step.scheduled
        self._serve(step)
        if not scheduled and tier is not None and tier.hurry(self._running):
            self._serve(step, may_draft=False)  # they have the blocks of what they know
        if not scheduled and self._running and all(request.held for request in self._running):
            # They wait for siblings, and those for blocks or seats: the last give way.
            step.preempted += self._requests.preempt_last(last_gang(self._running))
        self._micro_batches.planned(bool(scheduled))
        copies, self._copies = tuple(self._copies), []
        if copies:  # their sources were kept until now: nothing else of this step may be written there
            self.pool.release(source for source, _ in copies)
        transfers = None if tier is None else tier.finish(runs=bool(scheduled))
        fitting = self._drafting.fit(scheduled, forks=bool(step.forks))
        plan = StepPlan.of(fitting, step.preempted, step.forks, copies, transfers)
        _, verify, chunk = plan.segments
        fills = None if tier is None else tier.fill(beside=chunk.tokens > 0 and not verify.tokens)
        return plan if fills is None else replace(plan, fills=fills)

    def update(self, plan: StepPlan, sampled: Sequence[Sequence[int]]) -> list[NewTokens]:
        """Take in a step's results.

        Args:
            plan: the plan that has run.
            sampled: for each entry of ``plan.scheduled`` its new tokens: at least one where ``samples`` is true and at
                most one more than its drafts, none where it is not.

        Returns:
            The new tokens, in the plan's order. Those that come after a request's end are dropped, and all of those of
            requests that ended since ``schedule``.

        Raises:
            ValueError: ``sampled`` does not match the plan.
        """
        counts = [*map(len, sampled)]
        if counts != [item.samples for item in plan.scheduled]:  # equal if everyone who samples got one
            plan.check(counts)
        self._just_ended.clear()
        cache, size = self.prefix_cache, self.block_tokens
        new_tokens: list[NewTokens] = []
        for (request, _, _, _, _, drafts), tokens in zip(plan.scheduled, sampled, strict=True):
            if not tokens:
                continue
            request.num_pending_tokens -= 1
            if drafts:
                request.num_possible_tokens -= drafts
                self._drafting.learn(request, len(tokens) - 1)
                if request.status is RequestStatus.RUNNING:  # else its blocks are gone
                    request.num_computed_tokens += len(tokens) - 1
            if request.status.is_finished:
                continue
            output = request.output_token_ids
            output += tokens  # also of a request that was preempted since
            total, ending = len(request.prompt_token_ids) + len(output), None
            if total >= request.length_limit or not request.ends.isdisjoint(tokens) or request.watched:
                ending = cut(request, len(tokens))
            if ending is not None:
                new_tokens.append((request, tokens[: len(tokens) + request.num_tokens - total]))
                self._requests.end_by_results(request, *ending)
                continue
            new_tokens.append((request, tokens))
            if total % size < len(tokens) and request.num_pending_tokens and cache is not None:
                # the step in flight computes this token, the last of its block, which is known only now
                cache.insert(request)
        return new_tokens

    def append(self, request: Request, tokens: Sequence[int]) -> NewTokens:
        """Let tokens follow that nobody draws: the next step of the request computes them.

        Args:
            request: unfinished, with no token in flight.

        Returns:
            The request, with those of the tokens that do not come after its end.
        """
        output = request.output_token_ids
        output += tokens
        before = len(output) - len(tokens)
        ending = cut(request, len(tokens))
        if ending is not None:
            self._requests.end_by_results(request, *ending)
        return request, output[before:]

    def _serve(self, step: Outline, may_draft: bool = True) -> None:
        """Plan the running requests in order, and the waiting ones behind those of the same or a higher priority."""
        scheduled, preempted = step.scheduled, step.preempted
        budget, size, at = step.budget, self.block_tokens, 0
        self._prompts = self._new_share()
        possible, most_drafts = self._drafting.most, self._drafting.now(self._running) if may_draft else 0
        loading, micro_batches = () if self.tier is None else self.tier.loading, self._micro_batches
        micro_batches.begin(self._running)
        place, ended = self._place_of_waiting(), None
        while budget > 0 and at < len(self._running):
            if at == place:
                step.budget = budget
                ended = self._begin_first(step, at)
                at, place = (at + 1, self._place_of_waiting()) if ended is None else (at, -1)
                budget = step.budget
                continue
            request = self._running[at]
            at += 1
            total = len(request.prompt_token_ids) + len(request.output_token_ids) + request.num_pending_tokens
            if request.num_pending_tokens and total >= request.length_limit:
                continue  # the token in flight ends it
            if (request.controls and request.waits_for_tokens) or (loading and request in loading):
                continue
            start = request.num_computed_tokens
            end = last = total if total - start == 1 else min(total, start + self._prompts.room(request, budget))
            if end <= start or (end < total and not self.config.enable_chunked_prefill):
                continue  # others' prompts come first
            if micro_batches.are_taken and not micro_batches.is_free(request):
                continue
            drafts = 0
            if possible:
                if most_drafts and start + 1 == total:
                    # a token of the budget is left for each request behind it
                    room = min(budget - 1 - len(self._running) + at, request.length_limit - 1 - total)
                    drafts = max(0, min(most_drafts, request.num_drafts, room))
                last = min(end + request.num_possible_tokens + drafts, request.length_limit - 1)
            if last > len(request.block_ids) * size:  # one step of a request in `size`
                needed = self._blocks_for(last) - len(request.block_ids)
                while needed > self.pool.num_free and request.status is RequestStatus.RUNNING:
                    if drafts and len(self._running) == 1:  # it has the pool, but for its tail
                        drafts, last = 0, min(end + request.num_possible_tokens, request.length_limit - 1)
                        needed = self._blocks_for(last) - len(request.block_ids)
                    else:
                        preempted += self._requests.preempt_last()
                if request.status is not RequestStatus.RUNNING:
                    break  # it was the last itself: those before it are scheduled, and none is left behind it
                request.block_ids += self.pool.allocate_many(needed)
                if self.tier is not None:
                    self.tier.overwrite(request.block_ids[-needed:])
                if request.tail is not None:
                    self._copies.append((request.tail, request.block_ids[-needed]))
                    request.tail = None
            scheduled.append(self._advance(request, end, total, drafts))
            budget -= end - start + drafts
        step.budget = budget
        while ended is None:
            place = self._place_of_waiting()
            if preempted and place == len(self._running):
                ended = "preemption"
            else:
                ended = self._begin_first(step, place)
        self.admission_end = ended

    def _place_of_waiting(self) -> int:
        """Where the first waiting request comes among those that run: before all of lower priority."""
        if not self.policy.preempts:
            return len(self._running)
        return first_behind(self._running, self._waiting.first())

    def _new_share(self) -> PromptShare:
        return PromptShare(self.config, self._running, self._waiting)

    def _advance(self, request: Request, end: int, total: int, drafts: int = 0) -> ScheduledRequest:
        """Plan a running request's tokens up to ``end`` (exclusive), of ``total`` known and sampled ones, and drafts
        behind them."""
        start, pending = request.num_computed_tokens, request.num_pending_tokens
        self._prompts.take(request, end - start)
        samples = end == total
        request.num_computed_tokens = end
        request.num_pending_tokens += samples
        if samples:
            self._micro_batches.take(request)
        if drafts:
            request.num_possible_tokens += drafts
        if not pending and self.prefix_cache is not None:
            self.prefix_cache.insert(request, planning=True)
        return ScheduledRequest(request, start, end - start + drafts, samples, pending > 0, drafts)

    def _begin_first(self, step: Outline, place: int) -> AdmissionEnd | None:
        """Start the first waiting request, and plan its first chunk, if it fits; running ones of lower priority give
        way to it, if that is enough.

        Args:
            step: gets what comes of it.
            place: the index of the first running request of lower priority; the step has none of these yet.

        Returns:
            Why it did not fit; ``None`` if it did.
        """
        running, pool, seats = self._running, self.pool, self.config.max_num_seqs
        if place >= seats:
            return "seats"
        request = self._waiting.first()
        if request is None or request.num_pending_tokens:
            return "queue" if request is None else "in_flight"
        parent = parent_in(step.scheduled, request) if request.siblings else None
        room = self._prompts.room(request, step.budget)
        if parent is None and room <= 0:
            return "tokens"
        demand = _A_BLOCK if parent else self._admission.demand(request, most_blocks(running, place, pool))
        whole = parent is None and (request.is_whole or not self.config.enable_chunked_prefill)
        if whole and demand is not None and request.num_tokens - len(demand.cached) * self.block_tokens > room:
            return "tokens"
        gangs = None if demand is None else who_gives_way(running, place, demand, pool, seats, self._new_blocks)
        if demand is None or gangs is None:
            return "blocks"
        for count in gangs:
            step.preempted += self._requests.preempt_last(count, crowded=False)
        if parent is not None:
            fork(parent, request, pool, self.block_tokens)
        else:
            self._admission.allocate(request, demand.cached)
        self._requests.start_first(request)
        if self.tier is not None and request in self.tier.loading:
            return None
        total = request.num_tokens
        item = self._advance(request, min(total, request.num_computed_tokens + room), total)
        step.budget -= item.num_tokens
        (step.scheduled if parent is None else step.forks.setdefault(parent, [])).append(item)
        return None

    def _preempt_gangs(self) -> list[Request]:
        """Preempt whole gangs from the back, and single requests between them, if the blocks will not last for this
        step; the only gang that is left is preempted by its members, where it must."""
        preempted: list[Request] = []
        if self.pool.num_free >= self._most_new_blocks * len(self._running) or not any(
            request.siblings for request in self._running
        ):
            return preempted
        while self.pool.num_free < sum(map(self._new_blocks, self._running)):
            count = last_gang(self._running)
            if count == len(self._running):
                break
            preempted += self._requests.preempt_last(count)
        return preempted

    def _new_blocks(self, request: Request) -> int:
        """Blocks that a running request may need for its next step."""
        known = request.num_tokens + request.num_pending_tokens
        last = min(known + request.num_possible_tokens + self._drafting.most, request.length_limit - 1)
        return max(0, self._blocks_for(last) - len(request.block_ids))

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_tokens)
