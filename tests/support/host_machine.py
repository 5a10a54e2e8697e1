"""The scheduler with a tier in the host's memory under random loads, whose copies run as late as their order lets them.

Beside what holds without one (scheduler_machine.py): whatever a step reads has arrived, nothing is stored after it has
been overwritten, and the host may learn of any of it as late as it likes. Without a prefix cache the sequences of a
request are swapped together: what they leave is there for all that wait, or for none, and those who come back together
take all that they left, or nothing.
"""

from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from support.scheduler_machine import MAX_MODEL_LEN, FakeModel, SchedulerMachine
from tritonllm.engine.data.copy_batches import Transfers
from tritonllm.engine.data.request import RequestStatus
from tritonllm.engine.schedule import prompt_budget
from tritonllm.engine.schedule.host_tier import HostTier
from tritonllm.engine.schedule.rates import LATENCY, Rates
from tritonllm.engine.schedule.scheduler import Scheduler
from tritonllm.engine.schedule.speculation import Drafting
from tritonllm.engine.schedule.swaps import own_labels


class ModelWithHost(FakeModel):
    """Copies run one batch after the other, when a step waits for them or :meth:`copy_batch` is called. Those of blocks
    that a step fills end behind the step."""

    def __init__(self, block_size, accepts):
        super().__init__(block_size, accepts)
        self.host = {}
        self.batches = []
        self.issued = self.done = 0

    def run(self, plan, readable):
        if plan.transfers is not None:
            self.issue(plan.transfers)
        sampled = super().run(plan, readable)
        if plan.fills is not None:
            self.check_fills(plan)
            self.issue(Transfers(plan.fills.number, plan.fills.stores, ()))
        return sampled

    def check_fills(self, plan):
        """Each into a slot of its own, whole now, and of a prompt or output that this step goes on with."""
        blocks, slots = zip(*plan.fills.stores, strict=True)
        assert len(set(slots)) == len(slots) and len(set(blocks)) == len(blocks)
        written = {block for item in plan.scheduled for block in item.request.block_ids}
        assert written.issuperset(blocks)
        places = (block * self.block_size + place for block in blocks for place in range(self.block_size))
        assert all(self.slots.get(place) is not None for place in places)

    def issue(self, transfers):
        if transfers.number:
            assert transfers.number == self.issued + 1 and (transfers.stores or transfers.loads)
            self.issued += 1
            self.batches.append(transfers)
        assert transfers.wait <= self.issued
        while self.done < transfers.wait:
            self.copy_batch()

    def give_up(self, number):
        """No batch up to this one will be begun any more."""
        if number > self.issued:
            self.issued = number
            self.batches.append(Transfers(number, (), ()))  # ends with those before it

    def copy_batch(self):
        batch = self.batches.pop(0)
        for block, slot in batch.stores:
            self.host[slot] = [self.slots.get(block * self.block_size + place) for place in range(self.block_size)]
        for slot, block in batch.loads:
            for place, content in enumerate(self.host[slot]):
                self.slots[block * self.block_size + place] = content
        self.done = batch.number


class MachineWithHost(SchedulerMachine):
    patience = 4  # a request that waits for loads gains no token, and one that comes back may wait again

    @initialize(
        policy=st.sampled_from(["fcfs", "priority"]),
        caching=st.booleans(),
        block_size=st.integers(1, 4),
        num_blocks=st.one_of(st.integers(1, 4), st.integers(5, 24)),
        num_slots=st.one_of(st.integers(1, 4), st.integers(20, 100)),
        seats=st.integers(1, 5),
        more_tokens=st.integers(0, 8),
        ahead=st.booleans(),
        drafts=st.sampled_from([0, 0, 1, 3, 7]),
        luck=st.randoms(use_true_random=False),
        beside=st.sampled_from([1, 3, prompt_budget.BESIDE]),
        late=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
        least=st.sampled_from([0, 0, 2, 5]),
        streams=st.sampled_from([True, True, False]),
    )
    def start(self, num_slots, late, luck, least=0, streams=True, **settings):
        super().start(luck=luck, **settings)
        rates = Rates(block_tokens=self.block_size)
        if least:  # so many blocks are loaded sooner than computed, fewer are not
            rates.seconds_per_token = LATENCY / self.block_size / (least - 0.5)
        self.tier = HostTier(num_slots, rates)
        self.tier.streams = streams
        sizes = self.block_size, self.num_blocks, MAX_MODEL_LEN
        self.scheduler = Scheduler(
            self.config, *sizes, Drafting(self.drafts), self.tier, enable_prefix_caching=self.caching
        )
        self.model = ModelWithHost(self.block_size, self.model.accepts)
        self.luck, self.late = luck, late
        self.left = {}  # labels of what those that were preempted had behind their prompts

    def run_step(self, aborted=None):
        while self.model.batches and self.luck.random() >= self.late:
            self.model.copy_batch()
        self.tier.done = self.luck.choice([self.tier.done, self.model.done])
        super().run_step(aborted)
        self.check_tier()

    def check_plan(self, plan, ran_before, computed, waiting_for):
        """Those whose blocks are on their way are not served."""
        super().check_plan(plan, ran_before, computed, waiting_for | set(self.tier.loading))
        if not self.caching:
            self.check_swaps(plan, computed)

    def delayed(self, request):
        return self.tier.delays(request)

    def check_swaps(self, plan, computed):
        back = {}
        for request in self.live:
            if request.status is RequestStatus.RUNNING and self.left.get(request):
                start = next((item.start for item in plan.scheduled if item.request is request), None)
                loaded = (request.num_computed_tokens if start is None else start) // self.block_size
                loaded -= len(request.prompt_token_ids) // self.block_size
                assert loaded <= 0 or loaded == len(self.left[request])
                back.setdefault(self.gang(request), set()).add(loaded > 0)
            if request.status is RequestStatus.RUNNING:
                self.left.pop(request, None)
        assert all(len(ways) == 1 for ways in back.values())
        for request in plan.preempted:
            prompt, own = own_labels(request, self.block_size)
            full = min(computed[request], request.num_tokens - 1) // self.block_size
            self.left[request] = own[: max(0, full - len(prompt))]
        here = {}
        for request in self.live:
            if request.status is RequestStatus.PREEMPTED and self.left[request]:
                here.setdefault(self.gang(request), set()).update(map(self.tier.has, self.left[request]))
        assert all(len(ways) == 1 for ways in here.values())

    @staticmethod
    def gang(request):
        return id(request.siblings) if request.siblings else id(request)

    def check_tier(self):
        slots = list(self.tier._slot_of.values())
        written = [slot for slot, label in self.tier._lent.items() if label is None]
        assert sorted(slots + self.tier._free + written) == list(range(self.tier.num_slots))
        assert all(request in self.live for request in self.tier.loading)
        stats = self.scheduler.stats.tier
        assert stats.num_used_host_blocks == len(slots) <= stats.num_host_blocks == self.tier.num_slots
        swaps = self.tier._swaps
        of = {label: number for number, swap in swaps._swaps.items() for label in (*swap.prompt, *swap.own)}
        assert swaps._of == of and all(map(self.tier.has, of)) and all(swap.own for swap in swaps._swaps.values())

    @rule(begun=st.integers(0, 2))
    def break_off_a_step(self, begun):
        """Before anything is launched, before the model, or behind it, when the step's copies are issued."""
        plan = self.scheduler.schedule()
        batches = [plan.transfers, plan.fills and Transfers(plan.fills.number, plan.fills.stores, ())]
        for batch in batches[:begun]:
            if batch is not None:
                self.model.issue(batch)
        last = self.tier.last
        self.forget_everything()
        assert self.tier.take_stored() == []
        self.model.give_up(last)
        self.check_tier()

    @rule()
    def forget_everything(self):
        """As the engine does after a step that was broken off: all requests are lost, and copies under way go on."""
        for request in list(self.live):
            self.abort_one(request)
        self.in_flight.clear()
        self.left.clear()
        self.scheduler.reset()
        self.model.slots.clear()
