"""An exception at any line of the engine, Ctrl-C among them: nothing stays behind, the next call is as on a new one.

The injector counts the lines that run in the engine's files, and raises at the one it is told to.
"""

import inspect
import sys
from collections import Counter
from pathlib import Path

import pytest
from support.engines import greedy, tiny_checkpoint, tiny_llm, token_ids
from support.tiny_models import random_tokens
from support.tiny_tokenizer import VOCAB_SIZE

import tritonllm
from tritonllm import SamplingParams
from tritonllm.engine.loop.engine import LLMEngine
from tritonllm.engine.schedule.scheduler import Scheduler

FOLDERS = tuple(str(Path(tritonllm.__file__).parent / name) for name in ("engine", "offline"))
SHARED = random_tokens(9, VOCAB_SIZE, seed=1)
PROMPTS = [SHARED + random_tokens(n, VOCAB_SIZE, seed=n) for n in (1, 9)]
PARAMS = [
    SamplingParams(temperature=1.0, top_p=0.9, seed=3, max_tokens=3, ignore_eos=True, n=2, logprobs=1),
    SamplingParams(temperature=0.7, seed=5, max_tokens=2, stop=["e"], repetition_penalty=1.2, prompt_logprobs=0),
]


class Injector:
    """Raises at the ``nth`` passage of a line, of those in ``functions`` if they are given; or only counts."""

    def __init__(self, target=None, error=KeyboardInterrupt, functions=None):
        self.target, self.error, self.functions = target, error, functions
        self.passed, self.reaches = Counter(), {}

    def __enter__(self):
        sys.settrace(self._call)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def _call(self, frame, event, arg):
        if not frame.f_code.co_filename.startswith(FOLDERS):
            return None
        if self.functions is not None and frame.f_code.co_name not in self.functions:
            return None
        return self._line if self.target is None or self._may_reach(frame.f_code) else None

    def _may_reach(self, code):
        """Whether the target is in it."""
        if id(code) not in self.reaches:
            (filename, line), _ = self.target
            self.reaches[id(code)] = code.co_filename == filename and any(line == one for *_, one in code.co_lines())
        return self.reaches[id(code)]

    def _line(self, frame, event, arg):
        if event == "line":
            place = frame.f_code.co_filename, frame.f_lineno
            self.passed[place] += 1
            if self.target == (place, self.passed[place]):
                sys.settrace(None)
                raise self.error("injected")
        return self._line


def run(llm):
    return token_ids(llm.generate(PROMPTS, PARAMS, use_tqdm=False))


def check_clean(llm, expected, where):
    assert not llm.engine.has_unfinished_requests(), where
    stats = llm.engine.stats
    assert stats.num_free_blocks == stats.num_blocks, where
    assert (stats.num_running, stats.num_waiting) == (0, 0), where
    assert run(llm) == expected, where


@pytest.mark.parametrize(("ahead", "error"), [(False, RuntimeError), (True, KeyboardInterrupt)])
@pytest.mark.long
def test_at_every_line_of_a_call(ahead, error):
    settings = {"async_scheduling": ahead, "max_num_batched_tokens": 16, "num_blocks": 20, "max_model_len": 40}
    llm = tiny_llm(tiny_checkpoint(num_hidden_layers=1), **settings)  # called thousands of times
    expected = run(llm)
    with Injector() as counter:
        assert run(llm) == expected
    # The first passage of each line, or with steps in flight one in the middle, where requests run already
    targets = [(place, n // 2 + 1 if ahead else 1) for place, n in counter.passed.items()]
    assert len(targets) > 300
    broken_off = 0
    for target in targets:
        with Injector(target, error):
            try:
                run(llm)
            except error:
                broken_off += 1
            except ValueError as reason:  # in a policy's rank: the request is refused, and the message names the policy
                assert isinstance(reason.__cause__, ValueError) and isinstance(reason.__cause__.__cause__, error)
                broken_off += 1
        check_clean(llm, expected, target)
    assert broken_off > 0.9 * len(targets)


@pytest.mark.parametrize("ahead", [False, True])
def test_again_while_recovering(ahead):
    """A second Ctrl-C comes while the engine cleans up after the first."""
    llm = tiny_llm(async_scheduling=ahead)
    engine, expected = llm.engine, run(llm)

    def break_off():
        for index, prompt in enumerate(PROMPTS):
            engine.add_request(f"r{index}", prompt, greedy(3))
        engine.step()
        with Injector(at_schedule, KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            engine.step()

    first = Scheduler._serve.__code__
    at_schedule = (first.co_filename, first.co_firstlineno + 3), 1
    break_off()
    cleaning = {"_recover", "lose", "reset", "_forget_requests", "output"}
    with Injector(functions=cleaning) as counter:
        assert engine.has_unfinished_requests()
    assert len(counter.passed) > 15
    assert {output.request_id for output in engine.step()} == {"r0", "r1"}
    for place in counter.passed:
        break_off()
        with Injector((place, 1), functions=cleaning), pytest.raises(KeyboardInterrupt):
            engine.has_unfinished_requests()
        outputs = engine.step()
        assert {output.request_id for output in outputs} == {"r0", "r1"}, place
        assert all(output.finished for output in outputs)
        check_clean(llm, expected, place)


def test_a_failed_step_reports_every_request(monkeypatch):
    """Running ones and waiting ones; each once; and says why."""
    llm = tiny_llm(max_num_seqs=1)
    engine = llm.engine
    for name in "abc":
        engine.add_request(name, PROMPTS[0], greedy(5))
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "launch", lambda plan: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    assert engine.has_unfinished_requests()
    with pytest.raises(ValueError, match="in use"):
        engine.add_request("a", PROMPTS[0])
    outputs = engine.step()
    assert [output.request_id for output in outputs] == ["a", "b", "c"]
    assert {output.outputs[0].finish_reason for output in outputs} == {"error"}
    assert all("ZeroDivisionError" in output.error for output in outputs)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 0, 0]
    assert not engine.has_unfinished_requests() and engine.step() == []
    check_clean(llm, run(tiny_llm()), "after a failed step")


def test_lost_requests_can_be_aborted(monkeypatch):
    engine = tiny_llm().engine
    for name in "ab":
        engine.add_request(name, PROMPTS[0], greedy(5))
    monkeypatch.setattr(engine._runner, "launch", lambda plan: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    (output,) = engine.abort_request("a")
    assert (output.request_id, output.outputs[0].finish_reason) == ("a", "error")
    assert [output.request_id for output in engine.step()] == ["b"]


def test_a_token_that_cannot_be_decoded_ends_its_request_only(monkeypatch):
    llm = tiny_llm()
    expected = token_ids(llm.generate(PROMPTS, greedy(6), use_tqdm=False))
    at, poison = next((at, token) for at, token in enumerate(expected[1]) if token not in expected[0])
    decode = llm.engine.tokenizer.decode

    def failing(ids, **options):
        if poison in ids:
            raise LookupError("no such piece")
        return decode(ids, **options)

    monkeypatch.setattr(llm.engine.tokenizer, "decode", failing)
    outputs = llm.generate(PROMPTS, greedy(6), use_tqdm=False)
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error"]
    assert token_ids(outputs) == [expected[0], expected[1][: at + 1]]
    assert "no such piece" in outputs[1].error and outputs[0].error is None
    assert llm.engine.stats.num_free_blocks == llm.engine.stats.num_blocks


def test_nothing_of_a_recovered_engine_is_shared_with_the_old(monkeypatch):
    """A label on a block that was not computed would give the next call wrong tokens."""
    llm = tiny_llm(async_scheduling=True)
    expected = run(tiny_llm())
    monkeypatch.setattr(llm.engine._runner, "_forward", lambda *args: (_ for _ in ()).throw(RuntimeError("broken")))
    with pytest.raises(RuntimeError, match="broken"):
        run(llm)
    monkeypatch.undo()
    check_clean(llm, expected, "after a step that computed nothing")


def test_every_public_call_recovers_first():
    """So that no line between two calls sees what a broken change left."""
    harmless = (
        "from_config",
        "from_engine_args",
        "tokenizer",
        "get_tokenizer",
        "model_config",
        "model",
        "subscribe",
        "lockstep",
        "do_log_stats",  # it asks for stats
        "is_saving",  # the connector alone knows
        *("is_sleeping", "takes_requests", "check_sleep", "wake_up"),  # they ask the memory alone
        *("expert_load", "reset_expert_load"),  # they ask the counters alone
        "model_executor",  # what it leads to is load_weights
    )
    public = [name for name in vars(LLMEngine) if not name.startswith("_") and name not in harmless]
    calls = ["abort_request", "add_request", "call", "get_num_unfinished_requests", "has_unfinished_requests", "join"]
    # These require an idle engine, and so ask has_unfinished_requests.
    idle = ["load_weights", "reload_weights", "sleep"]
    assert sorted(public) == sorted([*calls, *idle, "present", "reset_prefix_cache", "stats", "step"])
    for name in public:
        found = vars(LLMEngine)[name]
        source = inspect.getsource(found.fget if isinstance(found, property) else found)
        assert ("self._require_idle(" if name in idle else "self._recover()") in source, name
    assert "self.has_unfinished_requests()" in inspect.getsource(LLMEngine._require_idle)
