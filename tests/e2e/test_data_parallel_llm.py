"""``LLM(data_parallel_size=2)``: the answers of one engine from two, in their order, and nothing left behind."""

import os
import signal
import subprocess
import sys
from contextlib import suppress

import psutil
import pytest
from support import forked_programs
from support.checkout import environment
from support.engines import tiny_checkpoint, tiny_llm, token_ids
from support.imported_processes import engine_processes, imported_processes
from support.processors import Bans
from support.server import eventually, socket_folders
from support.streams import all_gone
from support.waiting import PATIENCE

from tritonllm import LLM, BeamSearchParams, PoolingParams, SamplingParams
from tritonllm.demo import model_path
from tritonllm.serve.engines.engine_client import EngineDeadError

SETTINGS = {
    "device": "cpu",
    "block_size": 8,
    "num_blocks": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 256,
    "enable_sleep_mode": True,
    "logits_processors": [Bans],
}
SHORT = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
STORY = "There was a fox named Fin. Fin lived in a small den by the river with a red door. " * 4
WISHES = [
    SamplingParams(temperature=0, max_tokens=12),
    SamplingParams(temperature=0.8, top_p=0.95, seed=7, n=3, max_tokens=8),
    SamplingParams(temperature=1.0, max_tokens=10),  # its seed is the engine's and the request's
    SamplingParams(temperature=0, max_tokens=40, stop=["."], logprobs=3),
    SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=0, truncate_prompt_tokens=16),
    SamplingParams(temperature=0, max_tokens=6, extra_args={"below": 500}),  # of a processor in each engine
]


@pytest.fixture(scope="module")
def one():
    return LLM(str(model_path()), **SETTINGS)


@pytest.fixture(scope="module")
def two():
    before, others = socket_folders(), engine_processes()
    with imported_processes():
        llm = LLM(str(model_path()), data_parallel_size=2, **SETTINGS)
        engines = [child for child in engine_processes() if child not in others]
    yield llm
    llm.shutdown()
    assert len(engines) == 2 and all_gone(engines) and socket_folders() <= before
    llm.shutdown()
    with pytest.raises(EngineDeadError, match="were shut down: make a new LLM"):
        llm.generate("a")


def facts(output):
    """What must be equal, whichever engine it comes from. (Log-probabilities depend on what else is in a step.)"""
    said = [
        (c.index, list(c.token_ids), c.text, c.finish_reason, c.stop_reason, [sorted(p) for p in c.logprobs or ()])
        for c in output.outputs
    ]
    scored = None if output.prompt_logprobs is None else len(output.prompt_logprobs)
    return output.request_id, output.prompt, list(output.prompt_token_ids), scored, said


def test_outputs_are_those_of_one_engine_in_the_order_of_the_prompts(one, two):
    """More requests than are in the engines at once, which share beginnings and have all kinds of wishes."""
    prompts = [STORY + f"{i} + {i} =" if i % 2 else f"{i} + {i} =" for i in range(25)]
    params = [WISHES[i % len(WISHES)] for i in range(25)]
    expected = one.generate(prompts, params, use_tqdm=False)
    before = two.replica_stats
    outputs = two.generate(prompts, params, use_tqdm=False)
    assert list(map(facts, outputs)) == list(map(facts, expected))
    assert all(output.finished and output.metrics.finished_time for output in outputs)
    assert min(token for output in outputs[5 :: len(WISHES)] for token in output.outputs[0].token_ids) >= 500
    assert sum(output.num_cached_tokens for output in outputs) > 0
    pairs = list(zip(two.replica_stats, before, strict=True))
    assert len(pairs) == 2 and all(now.prompt_tokens > then.prompt_tokens for now, then in pairs)
    assert two.stats.generated_tokens == sum(now.generated_tokens for now, _ in pairs)
    metrics = [m for m in two.get_metrics() if m.name == "vllm:generation_tokens"]
    numbers = [str(now.generated_tokens) for now, _ in pairs]
    assert [(m.labels["engine"], f"{m.value}") for m in metrics] == list(zip("01", numbers, strict=True))
    assert one.replica_stats == [one.stats] and one.stats.generated_tokens == two.stats.generated_tokens


def test_a_dialogue_a_search_and_defaults(one, two):
    talk = [{"role": "user", "content": "What is 2 + 3?"}]
    assert two.get_default_sampling_params() == one.get_default_sampling_params()
    wish = SamplingParams(temperature=0, max_tokens=6)
    expected, found = (llm.chat([talk, talk], wish, use_tqdm=False) for llm in (one, two))
    assert token_ids(found) == token_ids(expected) and found[0].prompt == expected[0].prompt
    beams = BeamSearchParams(beam_width=3, max_tokens=5)
    expected, found = (llm.beam_search(["1 + 1 =", STORY, "2 + 2 ="], beams) for llm in (one, two))
    assert [[s.tokens for s in o.sequences] for o in found] == [[s.tokens for s in o.sequences] for o in expected]


def test_pooling(one, two):
    texts = ["a fox", "a river and a fox", STORY]
    expected, found = (llm.embed(texts, use_tqdm=False) for llm in (one, two))
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.outputs.embedding == pytest.approx(theirs.outputs.embedding, abs=1e-5)
    expected, found = (llm.score(texts[0], texts[1:], use_tqdm=False) for llm in (one, two))
    assert [o.outputs.score for o in found] == pytest.approx([o.outputs.score for o in expected], abs=1e-5)
    with pytest.raises(ValueError, match=r"task='classify'"):
        two.encode(texts, PoolingParams(task="classify"), use_tqdm=False)


def test_bad_input_is_named_and_the_next_batch_goes_on(one, two):
    with pytest.raises(ValueError, match=r"prompts\[1\]: prompt_token_ids must be integers from 0 to"):
        two.generate(["a", [10**6]], use_tqdm=False)
    nothing = SamplingParams(allowed_token_ids=[67], stop_token_ids=[67], min_tokens=1)  # which only an engine says
    said = []
    for llm in (one, two):
        with pytest.raises(ValueError) as error:
            llm.generate(["a", "b", "c"], [SHORT, nothing, SHORT], use_tqdm=False)
        said.append(str(error.value))
    assert said[0] == said[1] and said[0].startswith("prompts[1]: ")
    with pytest.raises(ValueError, match=r"logits_processors are functions.*leave out data_parallel_size"):
        two.generate("a", SamplingParams(logits_processors=[lambda ids, logits: logits]), use_tqdm=False)
    with pytest.raises(ValueError, match=r"priority=1 needs policy='priority'"):
        two.generate("a", SHORT, priority=[1], use_tqdm=False)
    for look in ("engine", "llm_engine"):
        with pytest.raises(ValueError, match="data_parallel_size is above 1, and each engine has a process of its own"):
            getattr(two, look)
    assert token_ids(two.generate("1 + 1 =", WISHES[0])) == token_ids(one.generate("1 + 1 =", WISHES[0]))


class Interrupting:
    """A progress bar at whose first step somebody presses Ctrl-C."""

    def __init__(self, **_):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def set_postfix_str(self, *_, **__):
        pass

    def update(self):
        raise KeyboardInterrupt


def test_an_interrupted_batch_leaves_nothing_in_the_engines(one, two):
    with pytest.raises(KeyboardInterrupt):
        two.generate([f"{i}" for i in range(40)], SHORT, use_tqdm=Interrupting)
    eventually(two.reset_prefix_cache)  # all blocks are free
    assert token_ids(two.generate("1 + 1 =", SHORT)) == token_ids(one.generate("1 + 1 =", SHORT))


def test_all_sleep_and_wake_up(one, two):
    two.sleep(level=2)
    assert two.is_sleeping and two.stats.num_free_blocks == two.stats.num_blocks
    with pytest.raises(RuntimeError, match="the engines sleep"):
        two.generate("a")
    two.wake_up(["weights"])
    two.wake_up(["kv_cache"])
    two.reload_weights()
    assert not two.is_sleeping
    with pytest.raises(ValueError, match="level"):
        two.sleep(level=5)
    assert token_ids(two.generate("1 + 1 =", WISHES[0])) == token_ids(one.generate("1 + 1 =", WISHES[0]))


@pytest.mark.long
def test_two_engines_of_two_ranks_and_the_death_of_one():
    """The others end with it, and the error says which one died, and of what."""
    tiny = {"block_size": 4, "num_blocks": 64, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    before, others, prompts = socket_folders(), engine_processes(), [list(range(5 + i, 25 + i)) for i in range(8)]
    llm = LLM(str(tiny_checkpoint()), data_parallel_size=2, tensor_parallel_size=2, device="cpu", **tiny)
    wish = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    assert token_ids(llm.generate(prompts, wish)) == token_ids(tiny_llm().generate(prompts, wish))
    processes = [child for child in engine_processes() if child not in others]
    engines = [child for child in psutil.Process().children() if child in processes]
    assert len(processes) == 4 and len(engines) == 2
    engines[1].send_signal(signal.SIGSTOP)  # so that its requests cannot end before it dies

    class Killing(Interrupting):
        def update(self):
            with suppress(psutil.NoSuchProcess):  # progress may come once more before its end is known
                engines[1].kill()

    with pytest.raises(EngineDeadError, match=r"replica 1: .* was killed by signal 9; the others were ended with it"):
        llm.generate(prompts, wish, use_tqdm=Killing)
    assert not engines[0].is_running()
    eventually(lambda: all_gone(processes))
    assert socket_folders() <= before
    with pytest.raises(EngineDeadError, match="replica 1"):
        llm.generate(prompts, wish)


SCRIPT = """
import sys
from tritonllm import LLM, SamplingParams
from tritonllm.demo import model_path

if __name__ == "__main__":
    llm = LLM(str(model_path()), data_parallel_size=2, device="cpu", num_blocks=512)
    print("ready", flush=True)
    sys.stdin.readline()
    llm.generate("1 + 1 =", SamplingParams(max_tokens=4), use_tqdm=False)
    print("generates", flush=True)
    llm.generate(["Once"] * 64, SamplingParams(max_tokens=1000, ignore_eos=True), use_tqdm=False)
"""


@pytest.fixture
def script(tmp_path):
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = forked_programs.Popen([sys.executable, str(file)], env=environment(), start_new_session=True, **pipes)
    yield process
    process.kill()
    process.communicate()


@pytest.mark.long
def test_ctrl_c_ends_all(script):
    before = socket_folders()
    assert script.stdout.readline() == "ready\n"
    engines = engine_processes(psutil.Process(script.pid))
    assert len(engines) == 2
    script.stdin.write("\n")
    script.stdin.flush()
    assert script.stdout.readline() == "generates\n"
    os.killpg(script.pid, signal.SIGINT)  # as a terminal does: to all of them
    _, errors = script.communicate(timeout=PATIENCE)
    assert script.returncode == -signal.SIGINT and errors.rstrip().endswith("KeyboardInterrupt")
    assert errors.count("Traceback") == 1
    assert all_gone(engines) and socket_folders() <= before


@pytest.mark.long
def test_a_script_without_a_guard_is_told(tmp_path):
    before, file = socket_folders(), tmp_path / "script.py"
    file.write_text(SCRIPT.replace('if __name__ == "__main__":', "if True:"))
    ended = subprocess.run([sys.executable, str(file)], env=environment(), capture_output=True, text=True)
    assert ended.returncode == 1 and not ended.stdout
    assert "replica 0: the engine process ended while it started, with status 1; a script makes" in ended.stderr
    assert socket_folders() <= before


def test_what_cannot_be_is_said(monkeypatch):
    with pytest.raises(ValueError, match="data_parallel_size must be"):
        LLM(str(tiny_checkpoint()), data_parallel_size=0)
    with pytest.raises(ValueError, match="device='cuda:1' is one device"):
        LLM(str(tiny_checkpoint()), data_parallel_size=2, device="cuda:1")
    monkeypatch.setitem(sys.modules, "tritonllm.offline.engines", None)  # as if one of its imports failed
    with pytest.raises(ImportError, match=r"data_parallel_size needs more packages .*pip install '\.\[serve\]'"):
        LLM(str(tiny_checkpoint()), data_parallel_size=2)
