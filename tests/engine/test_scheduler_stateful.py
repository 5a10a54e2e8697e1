"""The scheduler under random loads, with a model that can only see what the block tables show it.

Steps are run when they are planned; their results reach the scheduler at once, or after the next step was planned.
"""

import zlib
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.scheduling import has_unfinished

from tritonllm.config import CacheConfig, SchedulerConfig
from tritonllm.engine.request import Request, RequestStatus
from tritonllm.engine.scheduler import Scheduler
from tritonllm.sampling_params import SamplingParams

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
    }
)


def next_token(tokens):
    """The model: a function of all tokens before; one in 32 ends the output, one in 32 is the stop token."""
    return zlib.crc32(bytes(tokens)) % 32


def generate_alone(request, num_slots):
    """Output, status and stop reason of a request that has the engine to itself: the specification, written out."""
    params, tokens, output = request.params, list(request.prompt_token_ids), []
    while True:
        output.append(next_token(tokens + output))
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
    tokens that are in flight."""

    def __init__(self, block_size):
        self.block_size = block_size
        self.slots = {}
        self.outputs = {}

    def slot(self, request, position):
        return request.block_ids[position // self.block_size] * self.block_size + position % self.block_size

    def run(self, plan):
        spans = [(item, item.start, item.start + item.num_tokens) for item in plan.scheduled]
        for item, start, end in spans:
            salt = item.request.cache_salt
            for position, token in enumerate(self.tokens(item.request)[start:end], start):
                self.slots[self.slot(item.request, position)] = salt, position, token
        sampled = []
        for item, _, end in spans:
            context = [self.slots[self.slot(item.request, position)] for position in range(end)]
            expected = enumerate(self.tokens(item.request)[:end])
            assert context == [(item.request.cache_salt, position, token) for position, token in expected]
            sampled.append(next_token([token for *_, token in context]) if item.samples else None)
        for item, token in zip(plan.scheduled, sampled, strict=True):
            if item.samples:
                output = self.outputs.setdefault(item.request, [])
                assert len(output) == item.output_index
                output.append(token)
        return sampled

    def tokens(self, request):
        return [*request.prompt_token_ids, *self.outputs.get(request, ())]


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        policy=st.sampled_from(["fcfs", "priority"]),
        caching=st.booleans(),
        block_size=st.integers(1, 4),
        num_blocks=st.one_of(st.integers(1, 4), st.integers(5, 24)),
        seats=st.integers(1, 5),
        more_tokens=st.integers(0, 8),
        ahead=st.booleans(),
    )
    def start(self, policy, caching, block_size, num_blocks, seats, more_tokens, ahead):
        self.config = SchedulerConfig(max_num_seqs=seats, max_num_batched_tokens=seats + more_tokens, policy=policy)
        cache = CacheConfig(block_size=block_size, enable_prefix_caching=caching)
        self.scheduler = Scheduler(self.config, cache, num_blocks, MAX_MODEL_LEN)
        self.model = FakeModel(block_size)
        self.block_size, self.num_blocks, self.num_slots = block_size, num_blocks, num_blocks * block_size
        self.caching = caching
        self.ahead = ahead
        self.in_flight = []
        self.live = []
        self.added = 0

    def order(self, request):
        return request.priority if self.config.policy == "priority" else 0, request.arrival

    @rule(wishes=st.lists(WISHES, min_size=1, max_size=6))
    def add(self, wishes):
        for wish in wishes:
            self.add_one(**wish)

    def add_one(self, family, shared, tail, params, priority, salt):
        prompt = [family + 2] * shared + tail or [5]
        room = min(MAX_MODEL_LEN - len(prompt), params["max_tokens"] or MAX_MODEL_LEN)
        request = Request(
            f"r{self.added}",
            prompt,
            SamplingParams(**params),
            max_total_tokens=len(prompt) + room,
            eos_token_ids=frozenset([EOS]),
            priority=priority,
            arrival=self.added,
            cache_salt=salt,
        )
        self.added += 1
        if len(prompt) + 1 > self.num_slots:
            with pytest.raises(ValueError, match="num_blocks"):
                self.scheduler.add(request)
            return
        self.scheduler.add(request)
        self.live.append(request)

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
        ran_before = [request for request in self.live if request.status is RequestStatus.RUNNING]
        waiting_for = self.waiting_for_tokens()
        computed = {request: request.num_computed_tokens for request in ran_before}
        plan = self.scheduler.schedule()
        self.check_plan(plan, ran_before, computed, waiting_for)
        self.check_pool()
        self.in_flight.append((plan, self.model.run(plan)))
        if aborted is not None:
            self.abort_one(aborted)
        if not self.ahead or len(self.in_flight) > 1 or not plan.scheduled:
            self.take_results(*self.in_flight.pop(0))
            if not plan.scheduled:
                self.in_flight.clear()

    def waiting_for_tokens(self):
        """Requests with a token in flight that ends them."""
        waiting = set()
        for request in self.live:
            length = request.num_tokens + request.num_pending_tokens
            if request.num_pending_tokens and length >= min(request.max_total_tokens, self.num_slots + 1):
                waiting.add(request)
        return waiting

    def take_results(self, plan, sampled):
        finished = {item.request for item in plan.scheduled if item.request.status.is_finished}
        new_tokens = self.scheduler.update(plan, sampled)
        kept = [(i.request, t) for i, t in zip(plan.scheduled, sampled, strict=True) if i.samples]
        assert [(n.request, n.token_id) for n in new_tokens] == [(r, t) for r, t in kept if r not in finished]
        for new in new_tokens:
            assert new.request.output_token_ids[-1] == new.token_id
            if new.request.status.is_finished:
                self.check_ended(new.request)

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
            request, end = item.request, item.start + item.num_tokens
            total = request.num_tokens + request.num_pending_tokens - item.samples
            assert request.status is RequestStatus.RUNNING
            assert item.start == computed.get(request, item.start)
            assert item.start < end == request.num_computed_tokens <= total
            assert item.samples == (end == total)
            assert item.pending == (end > request.num_tokens)
            assert not item.pending or item.num_tokens == 1
            assert len(request.block_ids) >= -(-end // self.block_size)
        decodes = [item.num_tokens == 1 and item.samples for item in items]
        assert decodes == sorted(decodes, reverse=True)
        assert plan.num_decodes == sum(decodes)
        assert not waiting_for & set(planned)

        # Served in order: the scheduled are the first of the running, and only the last of them can be cut short.
        served = [request for request in running if request not in waiting_for]
        assert sorted(planned, key=self.order) == served[: len(planned)]
        if len(planned) < len(served) or not all(item.samples for item in items):
            assert plan.num_tokens == self.config.max_num_batched_tokens

        # Preempted from the back, admitted from the front, never both.
        admitted = [request for request in running if request not in ran_before]
        assert list(plan.preempted) == sorted(plan.preempted, key=self.order, reverse=True)
        assert not (plan.preempted and admitted)
        for request in plan.preempted:
            assert request.status is RequestStatus.PREEMPTED
            assert (request.block_ids, request.num_computed_tokens) == ([], 0)
            assert all(self.order(other) < self.order(request) for other in running)
        for request in admitted:
            assert all(self.order(request) < self.order(other) for other in waiting)
            assert request.num_cached_tokens is not None
            if not self.caching or request.params.prompt_logprobs is not None:
                assert request.num_cached_tokens == next(i.start for i in items if i.request is request) == 0
        if self.config.policy == "fcfs":
            assert all(self.order(r) < self.order(w) for r in running for w in waiting)

    @invariant()
    def check_pool(self):
        if not hasattr(self, "scheduler"):
            return
        pool, uses = self.scheduler.pool, Counter()
        contents = {}
        for request in self.live:
            assert (request.status is RequestStatus.RUNNING) == bool(request.block_ids)
            uses.update(request.block_ids)
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
        a token for good, unless (policy `priority` only) an earlier one joins, once per request at most."""
        if not hasattr(self, "scheduler"):
            return
        rounds = 1 if self.config.policy == "fcfs" else 1 + len(self.live)
        rounds *= 1 + self.ahead  # it may wait for its last token, which is in flight
        for _ in range(rounds * (1 + sum(request.max_total_tokens for request in self.live))):
            if not self.live:
                break
            self.run_step()
            self.check_pool()
        assert not self.live
        for results in self.in_flight:
            self.take_results(*results)
        assert self.scheduler.pool.num_free == self.num_blocks


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=6 * settings.default.max_examples)
