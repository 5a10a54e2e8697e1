"""The scheduler under random loads, with a model that can only see what the block tables show it.

Steps are run when they are planned; their results reach the scheduler at once, or after the next step was planned. With
drafts the model accepts as many as it likes, and the scheduler hears of it no earlier. Requests may have siblings, with
which they share blocks.
"""

import zlib
from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from support.scheduling import has_unfinished
from tritonllm.config.engine import SchedulerConfig
from tritonllm.config.sampling_params import SamplingParams
from tritonllm.engine.data.request import Request, RequestStatus
from tritonllm.engine.schedule import prompt_budget
from tritonllm.engine.schedule.gang import parent_in, prompt_blocks, room_for
from tritonllm.engine.schedule.policy import SchedulingPolicy
from tritonllm.engine.schedule.scheduler import Scheduler
from tritonllm.engine.schedule.speculation import Drafting

MAX_MODEL_LEN = 40
EOS, STOP = 0, 1


WISHES = st.fixed_dictionaries(
    {
        "family": st.integers(0, 1),
        "shared": st.integers(0, 12),
        "tail": st.lists(st.integers(0, 31), max_size=3),
        "params": st.fixed_dictionaries(
            {
                "max_tokens": st.one_of(st.none(), st.integers(4, 20)),
                "min_tokens": st.integers(0, 4),
                "ignore_eos": st.booleans(),
                "stop_token_ids": st.sampled_from([None, [STOP]]),
                "prompt_logprobs": st.sampled_from([None, None, 0]),
            }
        ),
        "priority": st.integers(-1, 1),
        "salt": st.sampled_from([None, None, "a"]),
        "n": st.sampled_from([1, 1, 2, 3, 6]),
    }
)


def next_token(tokens, seed):
    """The model: a function of all tokens before; one in 32 ends the output, one in 32 is the stop token."""
    return zlib.crc32(bytes([seed, *tokens])) % 32


def generate_alone(request, num_slots):
    """Output, status and stop reason of a request that has the engine to itself: the specification, written out."""
    params, tokens, output = request.params, list(request.prompt_token_ids), []
    while True:
        output.append(next_token(tokens + output, request.seed))
        if len(output) >= params.min_tokens:
            if output[-1] == EOS and not params.ignore_eos:
                return output, RequestStatus.FINISHED_STOPPED, None
            if output[-1] == STOP and params.stop_token_ids == [STOP]:
                return output, RequestStatus.FINISHED_STOPPED, STOP
        length = len(tokens) + len(output)
        if len(output) == params.max_tokens or length == MAX_MODEL_LEN or length == num_slots + 1:
            return output, RequestStatus.FINISHED_LENGTH, None


class FakeModel:
    """Writes each scheduled token into its slot, then reads every context back through the block table. It has seen the
    tokens that are in flight, and how many they are.

    Where drafts are wrong it leaves keys that nobody may ever read.
    """

    def __init__(self, block_size, accepts):
        self.block_size = block_size
        self.accepts = accepts  # how many of so many drafts
        self.slots = {}
        self.outputs = {}

    def slot(self, request, position):
        index = position // self.block_size
        block = request.tail if index == len(request.block_ids) else request.block_ids[index]
        return block * self.block_size + position % self.block_size

    def copy(self, pairs):
        """All at once: no block that one writes may another one read or write."""
        targets = [target for _, target in pairs]
        assert len(set(targets)) == len(targets) and not set(targets) & {source for source, _ in pairs}
        for source, target in pairs:
            for place in range(self.block_size):
                copied = self.slots.get(source * self.block_size + place)
                self.slots[target * self.block_size + place] = copied

    def readable(self, request, computed):
        return {self.slot(request, position) for position in range(computed)}

    def run(self, plan, readable):
        """Args:
        readable: what sequences had in the cache before: no other one may write there.
        """
        self.copy(plan.copies)
        spans = [self.span(item) for item in plan.scheduled]
        for item, (start, end), _ in spans:
            written = {self.slot(item.request, position) for position in range(start, end)}
            assert not any(written & slots for other, slots in readable.items() if other is not item.request)
        for item, (start, end), right in spans:
            salt = item.request.cache_salt
            known = self.tokens(item.request) + right
            for position in range(start, end):
                token = known[position] if position < len(known) else "wrong"
                self.slots[self.slot(item.request, position)] = salt, position, token
        sampled = []
        for item, (_, end), right in spans:
            known = self.tokens(item.request) + right
            end = min(end, len(known))
            context = [self.slots[self.slot(item.request, position)] for position in range(end)]
            expected = enumerate(known[:end])
            assert context == [(item.request.cache_salt, position, token) for position, token in expected]
            sampled.append([*right, next_token(known, item.request.seed)] if item.samples else [])
        for item, tokens in zip(plan.scheduled, sampled, strict=True):
            if item.samples:
                output = self.outputs.setdefault(item.request, [])
                assert len(output) == item.output_index or item.pending
                output += tokens
        return sampled

    def span(self, item):
        """Of an item: itself, its true positions that have slots, and the drafts that are right."""
        request, tokens, right = item.request, self.tokens(item.request), []
        start = item.start
        if item.pending:  # the last token, wherever the steps before have put it
            start = len(tokens) - 1
            assert item.start <= start
        end = start + item.num_tokens
        if item.samples:
            assert end - item.drafts == len(tokens)
            for _ in range(self.accepts(item.drafts)):
                right.append(next_token(tokens + right, request.seed))
        return item, (start, min(end, request.length_limit - 1)), right

    def tokens(self, request):
        return [*request.prompt_token_ids, *self.outputs.get(request, ())]


class Shortest(SchedulingPolicy):
    """Ranks that are neither all the same nor the user's, and nobody gives way to those that wait."""

    def rank(self, request):
        return len(request.prompt_token_ids) / 2


class SchedulerMachine(RuleBasedStateMachine):
    patience = 1

    @initialize(
        policy=st.sampled_from(["fcfs", "priority", Shortest]),
        caching=st.booleans(),
        block_size=st.integers(1, 4),
        num_blocks=st.one_of(st.integers(1, 4), st.integers(5, 24)),
        seats=st.integers(1, 5),
        more_tokens=st.integers(0, 8),
        ahead=st.booleans(),
        stages=st.sampled_from([1, 1, 2, 3]),
        drafts=st.sampled_from([0, 0, 1, 3, 7]),
        beside=st.sampled_from([1, 3, prompt_budget.BESIDE]),
        whole=st.sampled_from([False, False, True]),
        luck=st.randoms(use_true_random=False),
    )
    def start(
        self,
        policy,
        caching,
        block_size,
        num_blocks,
        seats,
        more_tokens,
        ahead,
        drafts,
        beside,
        luck,
        stages=1,
        whole=False,
    ):
        self.patched = pytest.MonkeyPatch()
        self.patched.setattr(prompt_budget, "BESIDE", beside)
        tokens = max(seats + more_tokens, MAX_MODEL_LEN * whole)
        limits = {"max_num_seqs": seats, "max_num_batched_tokens": tokens, "enable_chunked_prefill": not whole}
        limits |= {"scheduler_cls": policy} if policy is Shortest else {"policy": policy}
        self.config = SchedulerConfig(**limits)
        self.policy = policy
        sizes = block_size, num_blocks, MAX_MODEL_LEN
        self.scheduler = Scheduler(self.config, *sizes, Drafting(drafts), stages=stages, enable_prefix_caching=caching)
        self.model = FakeModel(block_size, lambda count: luck.randint(0, count))
        self.drafts = drafts
        self.block_size, self.num_blocks, self.num_slots = block_size, num_blocks, num_blocks * block_size
        self.caching = caching
        self.ahead, self.stages = ahead, stages
        self.broken = False  # in the middle of a step: Hypothesis breaks an example off where its data ends
        self.in_flight = []
        self.live = []
        self.added = 0

    def order(self, request):
        rank = {"fcfs": 0, "priority": request.priority}.get(self.policy, len(request.prompt_token_ids) / 2)
        return rank, request.arrival, request.seed

    @rule(wishes=st.lists(WISHES, min_size=1, max_size=6))
    def add(self, wishes):
        for wish in wishes:
            self.add_one(**wish)

    def add_one(self, family, shared, tail, params, priority, salt, n):
        prompt = [family + 2] * shared + tail or [5]
        room = min(MAX_MODEL_LEN - len(prompt), params["max_tokens"] or MAX_MODEL_LEN)
        requests = [
            Request(
                f"r{self.added}#{index}",
                prompt,
                SamplingParams(**params, n=n),
                max_total_tokens=len(prompt) + room,
                eos_token_ids=frozenset([EOS]),
                priority=priority,
                arrival=self.added,
                cache_salt=salt,
                seed=index,
            )
            for index in range(n)
        ]
        self.added += 1
        if len(prompt) + 1 > self.num_slots:
            with pytest.raises(ValueError, match="num_blocks"):
                self.scheduler.add(requests[0])
            return
        siblings = tuple(requests) if n > 1 else ()
        for request in requests:
            request.siblings = siblings
        self.enter(requests)

    def enter(self, requests):
        for request in requests:
            self.scheduler.add(request)
        self.live += requests

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data):
        self.abort_one(data.draw(st.sampled_from(self.live)))

    @rule()
    def step(self):
        self.run_step()

    @rule()
    def some_steps(self):
        for _ in range(8):
            self.run_step()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort_during_a_step(self, data):
        self.run_step(aborted=data.draw(st.sampled_from(self.live)))

    @precondition(lambda self: any(request.output_token_ids for request in self.live))
    @rule(data=st.data())
    def finish_with_a_stop_string(self, data):
        request = data.draw(st.sampled_from([request for request in self.live if request.output_token_ids]))
        self.scheduler.finish(request.request_id, RequestStatus.FINISHED_STOPPED, "a string")
        assert (request.finish_reason, request.stop_reason) == ("stop", "a string")
        self.check_ended(request)

    def abort_one(self, request):
        assert self.scheduler.abort(request.request_id) is request
        assert request.finish_reason == "abort"
        self.check_ended(request)
        assert self.scheduler.abort(request.request_id) is None

    def check_ended(self, request):
        self.live.remove(request)
        assert request.block_ids == []
        output, status, stop_reason = generate_alone(request, self.num_slots)
        if request.finish_reason == "abort" or isinstance(request.stop_reason, str):
            assert request.output_token_ids == output[: len(request.output_token_ids)]
        else:
            assert (request.output_token_ids, request.status, request.stop_reason) == (output, status, stop_reason)

    def run_step(self, aborted=None):
        self.broken = True
        ran_before = [request for request in self.live if request.status is RequestStatus.RUNNING]
        waiting_for = self.waiting_for_tokens()
        computed = {request: request.num_computed_tokens for request in ran_before}
        self.decoding = {request for request, count in computed.items() if request.num_tokens - count <= 1}
        readable = {request: self.model.readable(request, count) for request, count in computed.items()}
        self.short = self.scheduler.pool.num_free < sum(map(self.scheduler._new_blocks, ran_before))
        plan = self.scheduler.schedule()
        self.check_plan(plan, ran_before, computed, waiting_for)
        self.check_pool()
        readable = {request: slots for request, slots in readable.items() if request not in plan.preempted}
        results = self.model.run(plan, readable)
        if plan.scheduled:
            self.in_flight.append((plan, results))
        if aborted is not None:
            self.abort_one(aborted)
        if len(self.in_flight) > (self.stages - 1 + self.ahead if plan.scheduled else 0):
            self.take_results(*self.in_flight.pop(0))
        self.broken = False

    def undrawn(self):
        """Requests with a token that is not drawn before the next step begins."""
        plans = [plan for plan, _ in self.in_flight[len(self.in_flight) - self.stages + 1 :]] if self.stages > 1 else []
        return {item.request for plan in plans for item in plan.scheduled if item.samples}

    def waiting_for_tokens(self):
        """Requests with a token in flight that ends them, or that is not drawn yet."""
        waiting = self.undrawn() & set(self.live)
        for request in self.live:
            length = request.num_tokens + request.num_pending_tokens
            if request.num_pending_tokens and length >= min(request.max_total_tokens, self.num_slots + 1):
                waiting.add(request)
        return waiting

    def take_results(self, plan, sampled):
        finished = {item.request for item in plan.scheduled if item.request.status.is_finished}
        new_tokens = self.scheduler.update(plan, sampled)
        kept = [(i.request, t) for i, t in zip(plan.scheduled, sampled, strict=True) if i.samples]
        kept = [(request, tokens) for request, tokens in kept if request not in finished]
        assert [request for request, _ in new_tokens] == [request for request, _ in kept]
        for (request, new), (_, tokens) in zip(new_tokens, kept, strict=True):
            assert new == tokens[: len(new)] == request.output_token_ids[-len(new) :]
            assert len(new) == len(tokens) or request.status.is_finished
            if request.status.is_finished:
                self.check_ended(request)

    def check_plan(self, plan, ran_before, computed, waiting_for):
        items, planned = plan.scheduled, [item.request for item in plan.scheduled]
        running = sorted((r for r in self.live if r.status is RequestStatus.RUNNING), key=self.order)
        waiting = [request for request in self.live if request.status is not RequestStatus.RUNNING]
        assert bool(items) == bool(self.live) or self.in_flight
        assert len(running) == self.scheduler.num_running <= self.config.max_num_seqs
        assert len({request.seat for request in running} & set(range(self.config.max_num_seqs))) == len(running)
        assert len(waiting) == self.scheduler.num_waiting
        assert sum(item.num_tokens for item in items) == plan.num_tokens <= self.config.max_num_batched_tokens
        for item in items:
            request, end = item.request, item.start + item.num_tokens - item.drafts
            total = request.num_tokens + request.num_pending_tokens - item.samples
            assert request.status is RequestStatus.RUNNING
            assert item.start == computed.get(request, item.start)
            assert item.start < end + self.forked(item) == request.num_computed_tokens + self.forked(item) <= total + 1
            assert end <= total
            assert item.samples == (end == total)
            assert item.pending == (end > request.num_tokens)
            assert not item.pending or item.num_tokens == 1 + item.drafts
            assert item.samples or self.config.enable_chunked_prefill
            assert 0 <= item.drafts <= self.drafts and (item.samples or not item.drafts)
            assert request.num_possible_tokens <= 2 * self.drafts
            reach = min(end + request.num_possible_tokens, request.length_limit - 1)
            assert len(request.block_ids) + (request.tail is not None) >= -(-reach // self.block_size)
            assert request.tail is None or self.forked(item)
        kinds = [0 if item.num_tokens == 1 and item.samples else 1 if item.drafts else 2 for item in items]
        for i, item in enumerate(items):
            if self.forked(item):  # behind the one that computes what it samples from
                parent = next(other for other in reversed(items[:i]) if not self.forked(other))
                assert parent.request.siblings is item.request.siblings and parent.samples
                assert parent.start + parent.num_tokens == item.start
                kinds[items.index(parent)] = 2
        assert kinds == sorted(kinds)
        segments = [[item.num_tokens for item, mine in zip(items, kinds, strict=True) if mine == k] for k in range(3)]
        assert [(s.sequences, s.tokens, s.longest) for s in plan.segments] == [
            (len(counts), sum(counts), max(counts, default=0)) for counts in segments
        ]
        assert not waiting_for & set(planned)

        # Served in order: the scheduled are the first of the running, and only the last of them can be cut short; but
        # prompts beside decodes have a budget of their own.
        behind = {r for r in running if r.num_tokens + r.num_pending_tokens - r.num_computed_tokens > 1}
        late = behind - set(planned) if self.scheduler._prompts.left == 0 else set()
        served = [request for request in running if request not in waiting_for | late]
        if self.stages > 1:
            self.check_turns(planned, served, ran_before)
            served = sorted(planned, key=self.order)
        assert sorted(planned, key=self.order) == served[: len(planned)]
        if len(planned) < len(served) or not all(item.samples for item in items):
            dropped = self.drafts * len(
                served
            )  # at most: drafts had their part before the step turned out to have prompts
            least = min(self.config.max_num_batched_tokens, prompt_budget.BESIDE)  # prompts beside decodes
            assert plan.num_tokens >= least - dropped
        assert not (plan.segments.verify.tokens and plan.segments.chunk.tokens)

        # Preempted from the back, admitted from the front, never both but for priorities.
        admitted = [request for request in running if request not in ran_before]
        assert list(plan.preempted) == sorted(plan.preempted, key=self.order, reverse=True)
        for request in plan.preempted:
            assert all(self.order(other)[0] < self.order(request)[0] for other in admitted)
        self.check_priorities(plan, running, waiting, ran_before)
        for request in plan.preempted:  # with its siblings, unless nothing else is left
            apart = request.siblings and any(other.siblings is request.siblings for other in running)
            assert not apart or all(other.siblings is request.siblings for other in running)
            assert request.status is RequestStatus.PREEMPTED
            assert (request.block_ids, request.num_computed_tokens) == ([], 0)
            assert all(self.order(other) < self.order(request) for other in running)
        for request in admitted:
            assert all(self.order(request) < self.order(other) for other in waiting)
            assert request.num_cached_tokens is not None
            if request.seed == 0 and (not self.caching or request.params.prompt_logprobs is not None):
                start = next((i.start for i in items if i.request is request), 0)  # it may wait for loads
                comes_back = request.num_preemptions and (request.siblings or self.scheduler.tier)
                assert request.num_cached_tokens == start == 0 or comes_back
        if self.policy == "fcfs":
            assert all(self.order(r) < self.order(w) for r in running for w in waiting)

    def check_priorities(self, plan, running, waiting, ran_before):
        """Nobody waits while requests of lower priority hold what it needs, or tokens that it could have; and nobody is
        preempted in vain."""
        if plan.preempted and not self.short:
            assert any(request not in ran_before for request in running)  # it was for them
        if not waiting:
            return
        first = min(waiting, key=self.order)
        gives_way = self.policy == "priority"
        ahead = [request for request in running if not gives_way or self.order(request)[0] <= self.order(first)[0]]
        if len(ahead) == len(running) or first.num_pending_tokens or self.delayed(first):
            return
        used = sum(item.num_tokens for item in plan.scheduled if item.request in ahead)
        if not self.config.enable_chunked_prefill and self.scheduler.admission_end == "tokens":
            assert used + self.drafts * len(ahead) + first.num_tokens > self.config.max_num_batched_tokens
            return
        if self.scheduler.admission_end == "tokens" or used == self.config.max_num_batched_tokens:
            least = min(self.config.max_num_batched_tokens, prompt_budget.BESIDE)
            assert used >= least - self.drafts * len(ahead)
            return
        assert ahead, "those that run could all give way"
        held = {block for request in ahead for block in (*request.block_ids, request.tail)}
        held |= {source for source, _ in plan.copies}
        held.discard(None)
        cache, size = self.scheduler.prefix_cache, self.block_size
        found = prompt_blocks(first, size) if cache is None else cache.match(first)
        seats, others = room_for(first, size)
        needed = -(-first.num_tokens // size) - len(held.intersection(found)) + others
        siblings = [item for item in plan.scheduled if first.siblings and item.request in first.siblings]
        if len(siblings) == 1 and parent_in(siblings, first):
            seats, needed = 1, 1
        free = self.num_blocks - len(held) - len(ahead)
        assert len(ahead) + seats > self.config.max_num_seqs or needed > free

    def delayed(self, request):
        """It must wait whatever is free."""
        return False

    def check_turns(self, planned, served, ran_before):
        """Sequences that decode are dealt out to as many steps as there are stages, in order."""
        decoding = [r for r in ran_before if r in self.decoding]
        free = [r for r in served if r in self.decoding]
        mine = [r for r in sorted(planned, key=self.order) if r in self.decoding]
        assert mine == free[: len(mine)] and len(mine) <= -(-len(decoding) // self.stages)

    def forked(self, item):
        return item.num_tokens == 0

    @invariant()
    def check_pool(self):
        if not hasattr(self, "scheduler"):
            return
        pool, uses = self.scheduler.pool, Counter()
        contents = {}
        for request in self.live:
            tail = [] if request.tail is None else [request.tail]
            assert (request.status is RequestStatus.RUNNING) == bool(request.block_ids or tail)
            uses.update(request.block_ids + tail)
            for index, block in enumerate(request.block_ids):
                end = (index + 1) * self.block_size
                full = end <= min(request.num_computed_tokens, request.num_tokens)
                prefix = (request.cache_salt, *request.token_ids(0, end)) if full else request.request_id
                assert contents.setdefault(block, prefix) == prefix, f"block {block} has two meanings"
        assert [pool.ref_count(block) for block in range(self.num_blocks)] == [uses[b] for b in range(self.num_blocks)]
        assert pool.num_free + len(uses) == self.num_blocks
        assert has_unfinished(self.scheduler) == bool(self.live)

    def teardown(self):
        """Every request ends, within the bound of the scheduler's argument: each step the first request in order gains
        a token for good, unless (not of policy `fcfs`) an earlier one joins, once per request at most."""
        if not hasattr(self, "scheduler"):
            return
        try:
            if not self.broken:
                self.end()
        finally:
            self.patched.undo()

    def end(self):
        rounds = 1 if self.policy == "fcfs" else 1 + len(self.live)
        rounds *= self.stages + self.ahead  # it may wait for its last token, which is in flight
        rounds *= self.patience
        for _ in range(rounds * (1 + sum(request.max_total_tokens for request in self.live))):
            if not self.live:
                break
            self.run_step()
            self.check_pool()
        assert not self.live
        for results in self.in_flight:
            self.take_results(*results)
        assert self.scheduler.pool.num_free == self.num_blocks
