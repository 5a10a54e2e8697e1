"""Orders of requests (tritonllm/engine/schedule/policy.py); under random loads in test_scheduler_stateful.py."""

import pytest
from support.engines import tiny_llm
from support.scheduling import add, make, make_scheduler, step, steps

from examples.shortest_first import PATIENCE, ShortestPromptFirst
from tritonllm import SamplingParams
from tritonllm.config.engine import EngineConfig, SchedulerConfig
from tritonllm.engine.schedule.policy import ByArrival, ByPriority, SchedulingPolicy, policy_of


class Longest(SchedulingPolicy):
    preempts = True

    def rank(self, request):
        return -len(request.prompt_token_ids)


class Bad(SchedulingPolicy):
    def rank(self, request):
        return request.params.extra_args["rank"]


class NoRank(SchedulingPolicy):
    pass


class NeedsMore(SchedulingPolicy):
    def __init__(self, more):
        self.more = more


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({}, ByArrival),
        ({"scheduling_policy": "priority"}, ByPriority),
        ({"scheduler_cls": Longest}, Longest),
        ({"scheduler_cls": "examples.shortest_first.ShortestPromptFirst"}, ShortestPromptFirst),
        ({"scheduler_cls": "examples.shortest_first:ShortestPromptFirst"}, ShortestPromptFirst),
    ],
)
def test_the_policy_of_a_configuration(settings, kind):
    assert type(policy_of(EngineConfig.from_kwargs(model="m", **settings).scheduler)) is kind


@pytest.mark.parametrize(
    ("scheduler_cls", "message"),
    [
        ("vllm.core.scheduler.Scheduler", "scheduler_cls='vllm.core.scheduler.Scheduler' cannot be imported"),
        (f"{__name__}.Nothing", "Nothing' cannot be imported"),
        (
            SchedulerConfig,
            r"scheduler_cls must be a class derived from tritonllm\.engine\.schedule\.policy\.Scheduling",
        ),
        ("pathlib.Path", "scheduler_cls must be a class derived from"),
        (NoRank, "scheduler_cls: NoRank must have a rank.. and be made without arguments .*abstract"),
        (NeedsMore, "scheduler_cls: NeedsMore must have a rank.. and be made without arguments"),
    ],
)
def test_what_is_no_policy_is_refused_before_the_model_is_looked_for(scheduler_cls, message):
    with pytest.raises(ValueError, match=message):
        tiny_llm("/no/such/model", scheduler_cls=scheduler_cls)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scheduler_cls": 3}, "scheduler_cls must be a class or 'module.Name', got 3"),
        ({"scheduler_cls": "Name"}, "scheduler_cls must be a class or 'module.Name'"),
        ({"scheduler_cls": Longest, "policy": "priority"}, "policy='priority' and scheduler_cls are both an order"),
    ],
)
def test_bad_values(settings, message):
    with pytest.raises(ValueError, match=message):
        SchedulerConfig(**settings)


def test_waiting_requests_come_in_the_order_of_their_ranks():
    scheduler = make_scheduler(seats=1, scheduler_cls=ShortestPromptFirst)
    for arrival, (name, length) in enumerate((("a", 50), ("b", 9), ("c", 20), ("d", 5))):
        add(scheduler, name, length, length + 1, arrival=arrival)
    assert [*map(list, steps(scheduler, 4))] == [["b"], ["d"], ["c"], ["a"]]


def test_nobody_gives_way_to_who_waits_unless_the_policy_says_so():
    for policy, second in ((ShortestPromptFirst, ["a"]), (Longest, ["b"])):
        scheduler = make_scheduler(seats=1, scheduler_cls=policy)
        add(scheduler, "a", 20)
        step(scheduler)
        add(scheduler, "b", 30 if policy is Longest else 2)
        assert list(step(scheduler)) == second


def test_where_blocks_run_out_the_last_in_order_gives_way():
    """It arrived first."""
    scheduler = make_scheduler(11, caching=False, scheduler_cls=ShortestPromptFirst)
    long = add(scheduler, "a", 20, arrival=0)
    step(scheduler)
    short = add(scheduler, "b", 5, arrival=1)
    while set(step(scheduler)) == {"a", "b"}:
        assert not long.num_preemptions
    assert long.num_preemptions == 1
    assert scheduler.running == [short]


def test_a_long_prompt_does_not_starve():
    """Shorter ones come without end, and as many overtake it as the policy says."""
    scheduler = make_scheduler(seats=1, scheduler_cls=ShortestPromptFirst)
    long, count = add(scheduler, "long", 20 * PATIENCE + 4, 20 * PATIENCE + 5), 0
    while not long.status.is_finished:
        count += 1
        add(scheduler, f"{count}", 4, 5, arrival=count)
        step(scheduler)
    assert 20 <= count <= 24


def test_a_policy_that_fails_ends_no_request_but_its_own():
    llm = tiny_llm(scheduler_cls=Bad, logits_processors=[lambda *_: Quiet()])
    for extra, message in (({}, "KeyError: 'rank'"), ({"rank": "1"}, "must return a number, got '1'")):
        params = SamplingParams(max_tokens=2, extra_args=extra)
        with pytest.raises(ValueError, match=f"scheduler_cls: Bad.rank.*{message}"):
            llm.engine.add_request("a", [5, 6], params)
    assert not llm.engine.has_unfinished_requests()
    params = SamplingParams(max_tokens=2, n=2, extra_args={"rank": 0.5})
    assert len(llm.generate([[5, 6]], params, use_tqdm=False, priority=[3])[0].outputs) == 2


class Quiet:
    def admit(self, *_):
        return False


def test_a_rank_is_asked_for_once():
    """Sequences of one user's request have that of the first."""

    class Counting(SchedulingPolicy):
        calls = 0

        def rank(self, request):
            Counting.calls += 1
            return -Counting.calls

    scheduler = make_scheduler(scheduler_cls=Counting)
    requests = [make(f"r{i}", [5, 6, 7]) for i in range(3)]
    for request in requests:
        request.siblings = tuple(requests)
        scheduler.check(request)
    for request in requests:
        scheduler.add(request)
    assert Counting.calls == 1 and {request.order[0] for request in requests} == {-1}
