"""The circuit breaker as a state machine, with a clock of the test's own."""

from types import SimpleNamespace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.examples import examples

from tritonllm.route.breaker import Breaker

FIRST, MOST = 1.0, 8.0


def make(threshold=3, chance=lambda: 1.0):
    clock = SimpleNamespace(now=0.0)
    chosen = SimpleNamespace(failure_threshold=threshold, backoff_seconds=FIRST, max_backoff_seconds=MOST)
    return Breaker(chosen, lambda: clock.now, chance), clock


def fail(breaker, times=1):
    for _ in range(times):
        breaker.failed(breaker.begin())


def test_failures_in_a_row_open_it():
    breaker, _ = make()
    fail(breaker, 2)
    breaker.succeeded(breaker.begin())
    fail(breaker, 2)
    assert breaker.state == "closed"
    assert breaker.failed(breaker.begin())
    assert (breaker.state, breaker.allows()) == ("open", False)


def test_answers_that_break_off_are_failures_in_a_row():
    breaker, clock = make()
    for _ in range(3):
        assert breaker.state == "closed"
        number = breaker.begin()
        breaker.answered(number)
        breaker.failed(number)
    assert breaker.state == "open"
    clock.now += breaker.seconds_left
    breaker.answered(breaker.begin())  # of the trial, whose end may be far away
    assert breaker.state == "closed"


def test_half_open_lets_one_request_through_at_a_time():
    breaker, clock = make()
    fail(breaker, 3)
    clock.now = FIRST
    assert breaker.state == "half-open" and breaker.allows()
    number = breaker.begin()
    assert not breaker.allows()
    breaker.forgotten(number)  # the client left
    assert breaker.allows()
    breaker.succeeded(breaker.begin())
    assert breaker.state == "closed"


def test_the_backoff_doubles_up_to_its_limit_and_begins_anew():
    breaker, clock = make()
    lengths = []
    fail(breaker, 3)
    for _ in range(5):
        lengths.append(breaker.seconds_left)
        clock.now += breaker.seconds_left
        fail(breaker)
    assert lengths == [1, 2, 4, 8, 8]
    clock.now += breaker.seconds_left
    breaker.succeeded(breaker.begin())
    fail(breaker, 3)
    assert breaker.seconds_left == FIRST


@pytest.mark.parametrize(("chance", "part"), [(0.0, 0.5), (0.5, 0.75), (1.0, 1.0)])
def test_the_backoff_has_jitter(chance, part):
    breaker, _ = make(chance=lambda: chance)
    fail(breaker, 3)
    assert breaker.seconds_left == FIRST * part


def test_what_began_before_a_change_no_longer_counts():
    breaker, clock = make()
    old = [breaker.begin() for _ in range(4)]
    for number in old[:3]:
        breaker.failed(number)
    clock.now = FIRST
    assert not breaker.failed(old[3]) and breaker.state == "half-open"
    breaker.succeeded(old[3])
    assert breaker.state == "half-open"
    trial = breaker.begin()
    breaker.forgotten(old[3])
    assert not breaker.allows()
    breaker.succeeded(trial)
    assert breaker.state == "closed"


class Machine(RuleBasedStateMachine):
    """Requests that begin when they may and end in any order, while time passes; beside the least that must hold."""

    @initialize(threshold=st.integers(1, 4), chance=st.floats(0, 1))
    def start(self, threshold, chance):
        self.threshold = threshold
        self.breaker, self.clock = make(threshold, lambda: chance)
        self.running: list[tuple[int, int]] = []  # (number, how often it had opened when this began)
        self.openings = 0
        self.failures = 0  # in a row, of requests since it was last closed
        self.opened_at = None

    @precondition(lambda self: self.breaker.allows())
    @rule()
    def begin(self):
        if self.breaker.state == "half-open":
            assert not any(epoch == self.epoch() for _, epoch in self.running), "two trials"
        self.running.append((self.breaker.begin(), self.epoch()))

    def epoch(self):
        return self.openings if self.breaker.state == "closed" else -self.openings

    @precondition(lambda self: self.running)
    @rule(data=st.data(), outcome=st.sampled_from(["succeeded", "failed", "forgotten"]))
    def end(self, data, outcome):
        number, epoch = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        before, counts = self.breaker.state, epoch == self.epoch() and self.breaker.state != "open"
        opened = getattr(self.breaker, outcome)(number)
        if not counts:
            assert self.breaker.state == before and not opened
        elif outcome == "failed":
            self.failures += 1
            due = before == "half-open" or self.failures >= self.threshold
            assert opened == due == (self.breaker.state == "open")
            if opened:
                self.openings += 1
                self.failures, self.opened_at = 0, self.clock.now
                assert FIRST / 2 <= self.breaker.seconds_left <= MOST
        elif outcome == "succeeded":
            self.failures = 0
            assert self.breaker.state == "closed"
        else:
            assert self.breaker.state == before

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def answer(self, data):
        number, epoch = data.draw(st.sampled_from(self.running))
        before, counts = self.breaker.state, epoch == self.epoch() and self.breaker.state == "half-open"
        self.breaker.answered(number)
        assert self.breaker.state == ("closed" if counts else before)
        self.failures = 0 if counts else self.failures

    @rule(seconds=st.sampled_from([0.1, 0.5, 1.0, 4.0, 10.0]))
    def wait(self, seconds):
        self.clock.now += seconds

    @invariant()
    def it_never_stays_shut(self):
        if not hasattr(self, "breaker"):
            return
        if self.breaker.state == "open":
            assert not self.breaker.allows() and self.clock.now - self.opened_at < MOST
        elif self.breaker.state == "half-open":
            trials = [number for number, epoch in self.running if epoch == self.epoch()]
            assert self.breaker.allows() == (not trials)
        else:
            assert self.breaker.allows()


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
