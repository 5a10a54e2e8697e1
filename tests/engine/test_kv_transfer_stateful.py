"""The scheduler with a tier in the host's memory and a connector behind it, whose answers come in any order, late, not
as promised, or never.

Beside what holds with a tier alone (tests/support/host_machine.py): what is saved is what its key names, whatever a
request reads is right, every request ends, and all slots come back.
"""

from types import SimpleNamespace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule
from support.examples import examples
from support.host_machine import MachineWithHost
from support.kv_connectors import AskedConnector

from tritonllm.config.kv_transfer import KVTransferConfig
from tritonllm.engine.schedule import prompt_budget
from tritonllm.engine.start.kv_start import make_transfer

TIMEOUT = 3.0


class MachineWithConnector(MachineWithHost):
    @initialize(
        policy=st.sampled_from(["fcfs", "priority"]),
        block_size=st.integers(1, 4),
        num_blocks=st.one_of(st.integers(1, 4), st.integers(5, 24)),
        num_slots=st.one_of(st.integers(1, 4), st.integers(20, 100)),
        seats=st.integers(1, 5),
        more_tokens=st.integers(0, 8),
        ahead=st.booleans(),
        drafts=st.sampled_from([0, 0, 1, 3]),
        luck=st.randoms(use_true_random=False),
        beside=st.sampled_from([1, prompt_budget.BESIDE]),
        late=st.sampled_from([0.0, 0.5, 0.9]),
        silent=st.sampled_from([0.0, 0.3, 0.8]),
        bad=st.sampled_from([0.0, 0.2]),
    )
    def start(self, silent, bad, **settings):
        super().start(caching=True, **settings)
        config = KVTransferConfig(kv_connector="a:B", kv_connector_extra_config={"timeout": TIMEOUT})
        self.connector = AskedConnector()
        self.transfer = make_transfer(config, self.connector, self.scheduler, [], lambda: b"weights")
        self.copies = SimpleNamespace(run=self.model.issue, ending=lambda number: lambda: self.copy_until(number))
        self.elsewhere = {}  # what was saved, by key
        self.unscheduled = []
        self.now, self.silent, self.bad = 0.0, silent, bad

    def enter(self, requests):
        fetch = self.transfer.fetch(requests[0], {}, self.now)
        if fetch is None:
            super().enter(requests)
        else:
            self.unscheduled.append((requests, fetch))

    def copy_until(self, number):
        while self.model.done < number:
            self.model.copy_batch()
        return True

    def run_step(self, aborted=None):
        while self.connector.asked and self.luck.random() >= self.silent:
            self.answer(self.connector.asked.pop(self.luck.randrange(len(self.connector.asked))))
        self.now += self.luck.random()
        self.let_go()
        super().run_step(aborted)
        self.transfer.after_step(self.copies, not self.scheduler.num_running, self.now)
        self.check_tier()

    def let_go(self):
        self.transfer.follow(self.now)
        for requests, fetch in [one for one in self.unscheduled if one[1].done]:
            self.unscheduled.remove((requests, fetch))
            for request in requests:
                request.arrival = self.added
            self.added += 1
            super().enter(requests)
        assert all(fetch.deadline > self.now for _, fetch in self.unscheduled)

    def answer(self, asked):
        if asked.kind == "save":
            assert asked.params()
            for key, slot in zip(asked.keys, asked.slots, strict=True):
                contents = list(self.model.host[slot])
                assert self.elsewhere.setdefault(key, contents) == contents
            asked.future.set_result(len(asked.keys))
        elif asked.kind == "lookup":
            there = [key in self.elsewhere or self.luck.random() < self.bad for key in asked.keys]
            asked.future.set_result([*there, False].index(False))
        else:
            came = [key in self.elsewhere and self.luck.random() >= self.bad for key in asked.keys]
            for key, slot, here in zip(asked.keys, asked.slots, came, strict=True):
                self.model.host[slot] = list(self.elsewhere[key]) if here else ["damaged"] * self.block_size
            asked.future.set_result(came)

    @rule(count=st.integers(1, 5))
    def lose(self, count):
        for key in list(self.elsewhere)[:count]:
            del self.elsewhere[key]

    @rule()
    def forget_everything(self):
        """As in the base, but what copies under way read is still there: they are of steps that were launched."""
        slots = dict(self.model.slots)
        super().forget_everything()
        self.model.slots = slots
        self.transfer.reset()
        self.unscheduled.clear()

    def end(self):
        self.silent = 1.0  # whoever is not answered goes on without
        self.now += TIMEOUT
        self.let_go()
        super().end()
        for asked in self.connector.asked:
            self.answer(asked)
        self.transfer.follow(self.now)
        assert not self.unscheduled and not self.tier._lent
        assert not self.transfer._asking and not self.transfer._overdue


TestMachineWithConnector = MachineWithConnector.TestCase
TestMachineWithConnector.settings = settings(max_examples=examples(50))
