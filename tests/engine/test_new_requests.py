import pytest

from tritonllm.config.engine import EngineConfig
from tritonllm.config.sampling_params import SamplingParams
from tritonllm.engine.loop.new_requests import NewRequests, check_call
from tritonllm.engine.schedule.policy import NAMED, ByArrival, ByPriority
from tritonllm.engine.schedule.scheduler import Scheduler
from tritonllm.engine.text.input_processor import InputProcessor
from tritonllm.engine.text.pooling import PoolingAbility


@pytest.mark.parametrize(
    ("request_id", "priority", "policy", "message"),
    [
        (7, 0, "fcfs", "request_id must be a string, got 7"),
        ("a", True, "priority", "priority must be an integer, got True"),
        ("a", 1.0, "priority", "priority must be an integer, got 1.0"),
        ("a", 1, "fcfs", "priority=1 needs policy='priority'"),
    ],
)
def test_bad_calls(request_id, priority, policy, message):
    with pytest.raises(ValueError, match=message):
        check_call(request_id, priority, NAMED[policy]())


def test_good_calls():
    check_call("a", 0, ByArrival())
    check_call("", -3, ByPriority())


def new_requests(**ability):
    config = EngineConfig.from_kwargs(model="none", max_num_seqs=4, num_blocks=8, block_size=4)
    scheduler = Scheduler(config.scheduler, config.block_tokens, 8, 32)
    return NewRequests(InputProcessor(None, 50, 32, frozenset({0}), 0), PoolingAbility(**ability), scheduler)


def test_each_request_arrives_behind_the_one_before():
    new = new_requests()
    states = [new.state(name, [1, 2, 3], SamplingParams(n=2, max_tokens=4), 5) for name in "ab"]
    requests = [sequence.request for state in states for sequence in state.sequences]
    assert [request.arrival for request in requests] == [0, 0, 1, 1]
    assert {request.priority for request in requests} == {5}
    assert [state.request_id for state in states] == ["a", "b"] and states[0].prompt_token_ids == [1, 2, 3]


def test_a_model_that_does_not_generate_says_so():
    with pytest.raises(ValueError, match="it embeds"):
        new_requests(refuses_generation="it embeds").state("a", [1], None, 0)
