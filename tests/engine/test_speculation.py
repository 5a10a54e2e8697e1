"""Whether a step verifies drafts: what acceptance, batch and neighbours decide."""

import pytest
from support.scheduling import add, make

from tritonllm.config.engine import EngineConfig, SchedulerConfig, SpeculativeConfig
from tritonllm.config.speculative import parse_draft
from tritonllm.engine.data.control import ReadsOutput
from tritonllm.engine.schedule.scheduler import Scheduler
from tritonllm.engine.schedule.speculation import MOST_ROWS, PAUSE, DraftCounts, Drafting, most_verified, relative_cost


def make_scheduler(drafting, seats=8, num_blocks=1000):
    config = SchedulerConfig(max_num_seqs=seats, max_num_batched_tokens=512)
    return Scheduler(config, 4, num_blocks, 4000, drafting)


def run(scheduler, steps, accepts):
    """Steps of which drafts are accepted as ``accepts(request_id)`` says; returns the drafts of each."""
    found = []
    for _ in range(steps):
        plan = scheduler.schedule()
        found.append(sum(item.drafts for item in plan.scheduled))
        sampled = [
            [7] * (1 + min(item.drafts, accepts(item.request.request_id)) if item.samples else 0)
            for item in plan.scheduled
        ]
        scheduler.update(plan, sampled)
    return found


def test_drafts_that_are_never_right_stop():
    """After some steps, but for one in a hundred."""
    scheduler = make_scheduler(Drafting(4, adaptive=True))
    add(scheduler, "r", 3, 3000)
    found = run(scheduler, 1000, lambda name: 0)
    assert found[:2] == [0, 4]  # the prompt, and the first drafts
    verified = [step for step, drafts in enumerate(found) if drafts]
    assert verified[-1] > 800
    early = [step for step in verified if step < 50]
    assert 5 <= len(early) <= 20 and early == list(range(1, 1 + len(early)))
    assert len(verified) - len(early) <= 1000 // PAUSE


def test_drafts_come_back_when_they_are_right():
    scheduler = make_scheduler(Drafting(4, adaptive=True))
    add(scheduler, "r", 3, 3000)
    run(scheduler, 60, lambda name: 0)
    assert run(scheduler, 30, lambda name: 4) == [0] * 30
    found = run(scheduler, PAUSE, lambda name: 4)
    first = next(step for step, drafts in enumerate(found) if drafts)
    assert found[first:] == [4] * (PAUSE - first)


@pytest.mark.parametrize(("right", "goes_on"), [(1, False), (6, True)])
def test_a_batch_drafts_where_it_pays_in_sum(right, goes_on):
    """So many of eight requests have drafts that are right."""
    scheduler = make_scheduler(Drafting(4, adaptive=True))
    for index in range(8):
        add(scheduler, f"{index}", 3, 3000)
    found = run(scheduler, 90, lambda name: 1 if int(name) < right else 0)
    assert (found[-1] > 0) == goes_on
    assert found[1] == 32


def test_a_new_request_begins_with_what_others_had():
    scheduler = make_scheduler(Drafting(4, adaptive=True))
    first = add(scheduler, "a", 3, 3000)
    assert first.expected_accepts == 2.0
    run(scheduler, 3 * PAUSE, lambda name: 0)
    assert add(scheduler, "b", 3, 3000).expected_accepts < 1.5


def test_the_cost_grows_with_the_batch():
    costs = [relative_cost(count, 4) for count in (1, 8, 64, 256)]
    assert costs == sorted(costs) and 1.1 < costs[0] < 1.16 and 1.8 < costs[2] < 2
    assert relative_cost(8, 1) < relative_cost(8, 4)


def test_a_draft_model_takes_its_time():
    """Of a fifth of the model's: the step that verifies 4 drafts has five of its steps, and a plain one has one."""
    plain = relative_cost(8, 4)
    assert relative_cost(8, 4, 0.2) == pytest.approx((plain + 1.0) / 1.2)
    right = {}
    for cost in (0.0, 0.3):
        scheduler = make_scheduler(Drafting(4, adaptive=True, draft_cost=cost))
        add(scheduler, "r", 3, 3000)
        right[cost] = run(scheduler, 60, lambda name: 1)[-1]
    assert right == {0.0: 4, 0.3: 0}


def test_more_requests_than_a_step_verifies():
    config, limits = SpeculativeConfig(num_speculative_tokens=4), SchedulerConfig()
    assert most_verified(config, limits) == MOST_ROWS // 5 and most_verified(None, limits) == 0
    assert most_verified(config, SchedulerConfig(max_num_seqs=9)) == 9
    assert most_verified(config, SchedulerConfig(max_num_seqs=9, max_num_batched_tokens=42)) == 8
    assert most_verified(SpeculativeConfig(num_speculative_tokens=4, disable_by_batch_size=3), limits) == 3
    scheduler = make_scheduler(Drafting(4, 3))
    for index in range(3):
        add(scheduler, f"{index}", 3, 3000)
    assert run(scheduler, 3, lambda name: 0) == [0, 12, 12]
    add(scheduler, "3", 3, 3000)
    assert run(scheduler, 4, lambda name: 0) == [0, 0, 0, 0]


def test_a_step_with_a_prompt_has_no_drafts():
    """What was reserved for them stays; the next step has them again."""
    scheduler = make_scheduler(Drafting(3))
    request = add(scheduler, "a", 3, 3000)
    run(scheduler, 1, lambda name: 0)
    add(scheduler, "b", 300, 3000)
    plan = scheduler.schedule()
    assert [(i.request.request_id, i.num_tokens, i.drafts) for i in plan.scheduled] == [("a", 1, 0), ("b", 256, 0)]
    assert request.num_possible_tokens == 0 and len(request.block_ids) == 2
    scheduler.update(plan, [[7], []])
    assert run(scheduler, 3, lambda name: 0) == [0, 6, 6]


def test_who_goes_a_token_at_a_time():
    drafting = Drafting(4)
    for params, controls, drafts in (({}, (), 4), ({"logprobs": 3}, (), 4), ({"logprobs": -1}, (), 0)):
        request = make("r", 3, **params)
        request.controls = controls
        drafting.begin(request)
        assert request.num_drafts == drafts
    request = make("r", 3)
    request.controls = (ReadsOutput(),)
    drafting.begin(request)
    assert request.num_drafts == 0


def test_counts():
    counts = DraftCounts()
    counts.add(4, 3)
    counts.add(2, 0)
    counts.add(3, 1)
    places = [2, 1, 1, 0]
    assert counts == DraftCounts(3, 9, 4, num_accepted_tokens_per_pos=places)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("ngram:4", SpeculativeConfig(num_speculative_tokens=4)),
        ('{"method": "ngram", "num_speculative_tokens": 2}', SpeculativeConfig(num_speculative_tokens=2)),
        ({"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": None},
         SpeculativeConfig(num_speculative_tokens=2)),
        ({"model": "d", "num_speculative_tokens": 2},
         SpeculativeConfig(method="draft_model", model="d", num_speculative_tokens=2)),
        (parse_draft("d"), SpeculativeConfig(method="draft_model", model="d", num_speculative_tokens=4)),
        (parse_draft("c:/d:3"), SpeculativeConfig(method="draft_model", model="c:/d", num_speculative_tokens=3)),
        (parse_draft("c:/d"), SpeculativeConfig(method="draft_model", model="c:/d", num_speculative_tokens=4)),
        ("some.module:make:3", SpeculativeConfig(method="some.module:make", num_speculative_tokens=3)),
    ],
)  # fmt: skip
def test_ways_to_say_it(value, expected):
    assert SpeculativeConfig.of(value) == expected
    assert EngineConfig.from_kwargs(model="m", speculative_config=value).speculative_config == expected
    assert EngineConfig.from_kwargs(model="m").speculative_config is None


@pytest.mark.parametrize(
    ("given", "lookup"),
    [({}, (2, 5)), ({"prompt_lookup_min": 3}, (3, 3)), ({"prompt_lookup_max": 4}, (4, 4)),
     ({"prompt_lookup_min": 1, "prompt_lookup_max": 4}, (1, 4))],
)  # fmt: skip
def test_lookup(given, lookup):
    assert SpeculativeConfig(num_speculative_tokens=1, **given).lookup == lookup


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("ngram", "a method and a number, as ngram:4"),
        ("{ngram}", "is no JSON"),
        (4, "must be a dict"),
        ({"method": "ngram"}, "num_speculative_tokens is missing"),
        ({"num_speculative_tokens": 4}, "method is missing"),
        ({"method": "medusa", "num_speculative_tokens": 4}, "one of ngram, suffix, draft_model, eagle, eagle3 or"),
        ({"method": "eagle", "num_speculative_tokens": 4}, "method='eagle' needs model, a folder"),
        ({"method": "eagle3", "num_speculative_tokens": 4}, "method='eagle3' needs model, a folder"),
        ({"method": "draft_model", "num_speculative_tokens": 4}, "method='draft_model' needs model, a folder"),
        ({"model": " ", "num_speculative_tokens": 4}, "method='draft_model' needs model, .* got ' '"),
        ({"model": 3, "num_speculative_tokens": 4}, "needs model, .* got 3"),
        ({"method": "ngram", "model": "m", "num_speculative_tokens": 4}, "are for methods draft_model, eagle, eagle3"),
        ({"method": "suffix", "revision": "m", "num_speculative_tokens": 4}, "model and revision are for"),
        ({"model": "m", "num_speculative_tokens": 32}, "num_speculative_tokens must be at most 31, got 32"),
        ({"model": "m", "num_speculative_tokens": 4, "adaptive": 0}, "adaptive must be of type bool, got 0"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens must be an integer of at least 1"),
        ({"method": "ngram", "num_speculative_tokens": 32}, "num_speculative_tokens must be at most 31, got 32"),
        ({"method": "ngram", "num_speculative_tokens": 2, "draft": 1}, "'draft' is not supported; there are method"),
        ({"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 6, "prompt_lookup_max": 4},
         r"prompt_lookup_min \(6\) must be at most prompt_lookup_max \(4\)"),
        ({"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 40}, "at most 32"),
        ({"method": "suffix", "num_speculative_tokens": 2, "suffix_decoding_max_tree_depth": 40},
         "suffix_decoding_max_tree_depth must be at most 32"),
        ({"method": "suffix", "num_speculative_tokens": 2, "suffix_decoding_max_spec_factor": 0},
         "suffix_decoding_max_spec_factor must be greater than 0"),
    ],
)  # fmt: skip
def test_bad_configurations_are_named(value, message):
    with pytest.raises(ValueError, match=f"speculative_config.*{message}"):
        EngineConfig.from_kwargs(model="m", speculative_config=value)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"max_num_batched_tokens": 4, "max_num_seqs": 4}, "must fit into a step of max_num_batched_tokens=4"),
        ({"max_model_len": 5}, "must be less than max_model_len=5 by 2"),
    ],
)
def test_drafts_that_do_not_fit_are_named(more, message):
    with pytest.raises(ValueError, match=f"num_speculative_tokens=4.*{message}"):
        EngineConfig.from_kwargs(model="m", speculative_config="ngram:4", **more)


def test_a_tree_costs_the_drafter_a_pass_for_each_level():
    """And no more of its drafts can be right than it is deep."""
    assert relative_cost(2, 6, 0.5, depth=3) == pytest.approx(relative_cost(2, 6, 0.5) - 3 * 0.5 / 1.5)
    assert relative_cost(2, 6, 0.0, depth=3) == relative_cost(2, 6)
    request = make("r", 4)
    Drafting(6, depth=3).begin(request)
    assert (request.num_drafts, request.expected_accepts) == (6, 1.5)
