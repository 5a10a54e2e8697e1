"""Which step is drawn when, under random launches and ends."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tritonllm.engine.loop.in_flight import InFlight


class Running:
    """A step that was drawn."""


def launch(steps, number, late):
    steps.add(number, None if late else Running())


@given(
    stages=st.integers(1, 4),
    ahead=st.booleans(),
    kinds=st.lists(st.sampled_from(["late", "plain", "idle"]), max_size=40),
)
def test_steps_are_drawn_in_order_and_as_late_as_the_stages_ask(stages, ahead, kinds):
    """As the engine does it: launch, draw what is due, take in the oldest if too many are in flight."""
    steps, drawn, done, launched = InFlight(stages), [], [], 0

    def draw(idle):
        undrawn = steps.due(idle)
        if undrawn is None:
            return
        assert undrawn.behind == launched - 1 - undrawn.plan
        if stages > 1:
            assert undrawn.behind == stages - 1 or (idle and not len(steps) - 1 - undrawn.behind)
        else:  # all results before are in
            assert done == list(range(undrawn.plan))
        drawn.append(undrawn.plan)
        steps.drawn(Running())

    for kind in [*kinds, *["idle"] * (len(kinds) + 1)]:
        runs = kind != "idle"
        if runs:
            late = kind == "late" or stages > 1
            launch(steps, launched, late)
            launched += 1
            if not late:
                drawn.append(launched - 1)
        draw(idle=not runs)
        if len(steps) > (stages - 1 + ahead if runs else 0):
            plan, running = steps.pop()
            assert isinstance(running, Running)
            done.append(plan)
            draw(idle=False)
        assert len(steps) <= stages - 1 + ahead
    assert done == sorted(drawn) == list(range(launched)) and not len(steps)
    assert stages == 1 or drawn == sorted(drawn)


def test_what_is_not_drawn_is_not_popped():
    steps = InFlight(2)
    launch(steps, 0, late=True)
    assert steps.due(idle=False) is None
    with pytest.raises(AssertionError):
        steps.pop()
