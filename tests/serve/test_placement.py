"""Which replica gets a request: loads that are counted right, prompts that meet their beginnings again."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.examples import examples

from tritonllm.serve.engines.placement import FIRST_GUESS, PIECE, Placement

ROOMY = 100 * PIECE


def prompt_of(number, pieces=4):
    """Prompts of different numbers share nothing."""
    return [number] * (pieces * PIECE + 1)


def test_equal_replicas_take_turns():
    placement = Placement([ROOMY] * 3)
    assert [placement.place(str(i), prompt_of(i), 10) for i in range(6)] == [0, 1, 2, 0, 1, 2]


def test_the_least_tokens_in_flight_win():
    placement = Placement([ROOMY] * 2)
    assert placement.place("long", prompt_of(1, pieces=50), 10) == 0
    assert [placement.place(f"short-{i}", prompt_of(2 + i, pieces=1), 10) for i in range(5)] == [1] * 5
    placement.progress("long", 1)  # its prompt is computed
    assert placement.loads == (9, 5 * (PIECE + 1 + 10))
    assert placement.place("next", prompt_of(9, pieces=1), 10) == 0


def test_a_conversation_stays_where_its_beginning_is():
    placement = Placement([ROOMY] * 4)
    first = prompt_of(7, pieces=8)
    home = placement.place("turn-0", first, 10)
    placement.end("turn-0")
    for turn in range(1, 5):
        first = [*first, *([100 + turn] * PIECE)]
        assert placement.place(f"turn-{turn}", first, 10) == home
        placement.end(f"turn-{turn}")
    assert placement.place("salted", first, 10, salt="other") != home, "another tenant finds nothing there"


def test_a_busy_home_gives_way():
    """When all ask for one beginning, its replica has less to compute for each, until it has too much."""
    placement = Placement([ROOMY] * 2)
    shared = prompt_of(3, pieces=16)
    homes = [placement.place(str(i), [*shared, i], 100) for i in range(40)]
    first_elsewhere = homes.index(1)
    assert 8 <= first_elsewhere <= 12, "the load of the first is then twice the beginning"
    rest = homes[first_elsewhere + 12 :]
    assert abs(sum(rest) - len(rest) / 2) <= 1, "both have it now, and half of the requests each"


def test_the_oldest_prompts_are_forgotten_from_their_ends():
    placement = Placement([6 * PIECE, ROOMY])
    assert placement.place("a", prompt_of(1), 1) == 0  # 4 pieces
    assert placement.place("b", prompt_of(5, pieces=40), 1) == 1
    assert placement.place("c", prompt_of(2), 1) == 0  # 4 more: two of the first are forgotten
    for name in "abc":
        placement.end(name)
    loads = []
    for number in (1, 2):
        assert placement.place("again", prompt_of(number), 0) == 0
        loads.append(placement.loads[0])
        placement.end("again")
    assert loads == [2 * PIECE + 1] * 2, "and the first took room from the second"


def test_lengths_are_learned():
    placement = Placement([ROOMY])
    placement.place("a", [1], 10_000)
    assert placement.loads == (1 + FIRST_GUESS,)
    for i in range(200):
        placement.progress("a", 5)
        placement.end("a")
        placement.place("a", [1], 10_000)
        assert placement.loads[0] > 0, i
    assert placement.loads == (1 + 5,)


def test_a_lost_replica_gets_nothing_more():
    placement = Placement([ROOMY] * 2)
    homes = {str(i): placement.place(str(i), prompt_of(i), 10) for i in range(6)}
    assert placement.lose(1) == [name for name, home in homes.items() if home == 1]
    assert {placement.place(f"new-{i}", prompt_of(i), 10) for i in range(6)} == {0}
    assert placement.lose(0)
    with pytest.raises(ValueError, match="every replica is lost"):
        placement.place("late", [1], 1)
    with pytest.raises(ValueError, match="capacities"):
        Placement([])


class Placements(RuleBasedStateMachine):
    """A load is what its requests have left, whatever happens to them in whichever order."""

    def __init__(self):
        super().__init__()
        self.placement = Placement([ROOMY, 2 * PIECE, ROOMY])
        self.left = {}  # replica, and an upper bound of the tokens left
        self.dead = set()
        self.count = 0

    @precondition(lambda self: len(self.dead) < 3)
    @rule(number=st.integers(0, 3), pieces=st.integers(0, 3), most=st.integers(1, 300), n=st.integers(1, 3))
    def place(self, number, pieces, most, n):
        self.count += 1
        prompt = prompt_of(number, pieces)
        replica = self.placement.place(str(self.count), prompt, most, n=n)
        assert replica not in self.dead
        self.left[str(self.count)] = replica, len(prompt) + n * most

    @precondition(lambda self: self.left)
    @rule(data=st.data(), tokens=st.integers(0, 50))
    def progress(self, data, tokens):
        self.placement.progress(data.draw(st.sampled_from(sorted(self.left))), tokens)

    @precondition(lambda self: self.left)
    @rule(data=st.data())
    def end(self, data):
        name = data.draw(st.sampled_from(sorted(self.left)))
        self.placement.end(name)
        self.placement.end(name)  # the second time: nothing
        self.placement.progress(name, 3)
        del self.left[name]

    @precondition(lambda self: len(self.dead) < 2)
    @rule(replica=st.integers(0, 2))
    def lose(self, replica):
        self.dead.add(replica)
        lost = self.placement.lose(replica)
        assert sorted(lost) == sorted(name for name, (home, _) in self.left.items() if home == replica)
        for name in lost:
            del self.left[name]

    @invariant()
    def loads_are_what_is_left(self):
        for replica, load in enumerate(self.placement.loads):
            most = sum(tokens for home, tokens in self.left.values() if home == replica)
            assert 0 <= load <= most


Placements.TestCase.settings = settings(max_examples=examples(60), deadline=None)
TestPlacements = Placements.TestCase


@given(st.lists(st.integers(0, (1 << 32) - 1), max_size=3 * PIECE), st.integers(1, 4))
@settings(max_examples=examples(50), deadline=None)
def test_any_prompt_can_be_placed(prompt, replicas):
    placement = Placement([1] * replicas)
    placement.place("a", prompt, 1)
    placement.end("a")
    assert placement.loads == (0,) * replicas
