"""Rendezvous hashing: who leaves gives away its own keys only, who comes takes its share, loads keep their bound."""

import math
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from support.rendezvous import placed_slowly, ranked

from tritonllm.http.hashing import placed as placed_among

NAMES = st.lists(st.text(min_size=1, max_size=12), min_size=2, max_size=12, unique=True)
KEYS = [f"prompt {i}".encode() for i in range(400)]


def placed(key, loads, epsilon, min_load=0):
    """The name of the one that is chosen."""
    names = list(loads)
    return names[placed_among(key, [name.encode() for name in names], list(loads.values()), epsilon, min_load)]


LOADS = st.integers(0, 20) | st.integers(0, 10**9)


@given(NAMES.flatmap(lambda names: st.fixed_dictionaries(dict.fromkeys(names, LOADS))), st.floats(0, 2), LOADS)
def test_the_choice_is_the_first_one_in_the_keys_order_that_is_not_too_full(loads, epsilon, least):
    for key in KEYS[:50]:
        assert placed(key, loads, epsilon, least) == placed_slowly(key, loads, epsilon, least)


@given(NAMES, st.randoms())
def test_the_order_of_the_names_does_not_matter(names, chance):
    shuffled = list(names)
    chance.shuffle(shuffled)
    for key in KEYS[:20]:
        assert ranked(key, names) == ranked(key, shuffled)
        assert sorted(ranked(key, names)) == sorted(names)


@given(NAMES, st.data())
def test_a_backend_that_leaves_gives_away_its_own_keys_only(names, data):
    gone = data.draw(st.sampled_from(names))
    left = [name for name in names if name != gone]
    for key in KEYS[:100]:
        before = ranked(key, names)
        assert ranked(key, left) == [name for name in before if name != gone]


@given(st.integers(2, 12), st.integers(0, 1000))
def test_a_new_backend_takes_about_its_share(count, first):
    names = [f"http://host-{first + i}:8000" for i in range(count)]
    before = [ranked(key, names[:-1])[0] for key in KEYS]
    after = [ranked(key, names)[0] for key in KEYS]
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) <= {names[-1]}  # nobody else takes a key
    share = len(KEYS) / count
    assert abs(len(moved) - share) < 6 * math.sqrt(share)  # six standard deviations of a fair draw, and more


def test_keys_are_spread_evenly():
    names = [f"http://10.0.0.{i}:8000" for i in range(8)]
    counts = Counter(ranked(f"key {i}".encode(), names)[0] for i in range(8000))
    assert all(abs(counts[name] - 1000) < 200 for name in names)


REQUESTS = st.lists(st.tuples(st.sampled_from(KEYS[:5]), st.integers(1, 5000)), max_size=60)


@given(NAMES, REQUESTS, st.floats(0, 2), st.integers(0, 3000), st.data())
def test_no_load_passes_its_bound(names, requests, epsilon, least, data):
    """Whatever comes and ends, a backend that takes a request was at most at (1 + epsilon) times the mean before."""
    loads, running = dict.fromkeys(names, 0), []
    for key, tokens in requests:
        chosen = placed(key, loads, epsilon, least)
        assert loads[chosen] <= max((1 + epsilon) * sum(loads.values()) / len(loads), least)
        loads[chosen] += tokens
        running.append((chosen, tokens))
        if data.draw(st.booleans()):
            name, ended = running.pop(data.draw(st.integers(0, len(running) - 1)))
            loads[name] -= ended


@given(NAMES)
def test_a_popular_key_overflows_in_its_own_order(names):
    loads = dict.fromkeys(names, 0)
    order = ranked(b"popular", names)
    assert placed(b"popular", loads, 0.25) == order[0]
    loads[order[0]] = 100
    assert placed(b"popular", loads, 0.25) == order[1]
    assert placed(b"popular", loads, 0.25, min_load=100) == order[0]
    if len(names) > 2:
        loads[order[1]] = 100
        expected = order[2] if 1.25 * 200 / len(names) < 100 else order[0]
        assert placed(b"popular", loads, 0.25) == expected
