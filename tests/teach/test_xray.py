"""The x-ray shows what ran, changes nothing in it, and leaves nothing behind."""

import io
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pexpect
import pytest
import torch
from matplotlib.image import imread
from rich.console import Console
from support import forked_programs
from support.engines import greedy, similar_checkpoint, tiny_checkpoint, tiny_llm, token_ids
from support.tiny_configs import ALL_FAMILIES, WITHOUT_FAMILY, tiny_config
from support.tiny_models import write_checkpoint
from support.waiting import PATIENCE

from tritonllm import SamplingParams
from tritonllm.cli import main
from tritonllm.kernels.runtime import tuning
from tritonllm.teach.xray import draw, roofline, viewer
from tritonllm.teach.xray.costs import visible
from tritonllm.teach.xray.options import wishes_of
from tritonllm.teach.xray.roofline import Roofline
from tritonllm.teach.xray.stages import Recording, StageRecorder
from tritonllm.teach.xray.viewer import OPTIONS, XRay
from tritonllm.teach.xray.wishes import Wishes

PROMPT = list(range(5, 25))
CPU = torch.device("cpu")
ROOF = Roofline("CPU", 1e10, 4e10, torch.float32)


@pytest.fixture(autouse=True)
def no_measurement(monkeypatch):
    monkeypatch.setattr(viewer, "measure", lambda device, dtype: ROOF)


def look(llm, wishes, prompts, params, monkeypatch=None):
    """``(outputs, printed text, recordings)`` of a run under the x-ray."""
    text, recordings = io.StringIO(), []
    plain = draw.print_step

    def keep(console, planned, recording, *others):
        recordings.append((planned, recording))
        plain(console, planned, recording, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draw, "print_step", keep)
        xray = XRay(wishes, Console(file=text, width=220))
        outputs = xray.run(llm, lambda: llm.generate(prompts, params, use_tqdm=False))
    return outputs, text.getvalue(), recordings


def watched(**options):
    settings = {"async_scheduling": False, "enforce_eager": True, **options}
    return tiny_llm(**settings)


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_every_family(family, tmp_path):
    """The same tokens as without; every operation counted; both images."""
    llm = watched(checkpoint=tiny_checkpoint(family), skip_tokenizer_init=True)
    params = greedy(4, detokenize=False)
    expected = token_ids(llm.generate([PROMPT, PROMPT[:3]], params, use_tqdm=False))
    llm.reset_prefix_cache()
    pattern, lens = tmp_path / "a.png", tmp_path / "l.png"
    draws = family in ("qwen3", "gpt_oss")  # the others' are those of test_xray_lens.py
    wishes = Wishes(attention=(1, 0, pattern), lens=(-1, lens)) if draws else Wishes()
    outputs, text, recordings = look(llm, wishes, [PROMPT, PROMPT[:3]], params)
    assert "sampling" in text
    assert token_ids(outputs) == expected
    assert [planned.parts[0].kind for planned, _ in recordings] == ["prefill", "decode"]
    if draws:
        assert f"Wrote {pattern}" in text and f"Wrote {lens}" in text
        assert imread(pattern)[..., :3].std() > 0.05 and imread(lens)[..., :3].std() > 0.05
    for _, recording in recordings:
        check(recording, layers=llm.engine.model.spec.num_layers)


def check(recording, layers):
    """Of any recording."""
    assert not recording.failures
    stages = {operation.stage for operation in recording.operations}
    assert {"inputs", "embedding", "attention", "logits", "sampling"} <= stages
    assert {operation.layer for operation in recording.operations} == {None, *range(layers)}
    assert all(operation.seconds > 0 for operation in recording.operations)
    assert recording.explained + recording.own + recording.rest == pytest.approx(recording.seconds)
    rows = draw.table_rows(recording)
    listed = [operation for row in rows if row.style != "head" for operation in row.operations]
    assert sorted(map(id, listed)) == sorted(map(id, recording.operations)), "every operation in one line"


def modules_are_clean(model):
    return all("forward" not in module.__dict__ and "normalize" not in module.__dict__ for module in model.modules())


def test_flops_and_bytes_of_a_whole_step():
    """Of a prompt in chunks behind a cached beginning, and of decodes: products by the model's sizes, attention by the
    lengths that the scheduler planned."""
    llm = watched(max_num_batched_tokens=16, max_num_seqs=2)
    llm.generate([PROMPT[:8]], greedy(1), use_tqdm=False)
    prompts = [PROMPT, PROMPT[:12] + PROMPT[::-1]]
    _, text, recordings = look(llm, Wishes(steps=tuple(range(2, 20))), prompts, greedy(8))
    spec, chunks, decodes = llm.engine.model.spec, 0, 0
    layer = spec.layers[0]
    heads, kv_heads, size = layer.attention.num_heads, layer.attention.num_kv_heads, layer.attention.head_size
    columns = (heads + 2 * kv_heads) * size + spec.hidden_size * heads * size // spec.hidden_size
    assert columns == (2 * heads + 2 * kv_heads) * size
    mlp = 3 * layer.mlp.intermediate_size
    for planned, recording in recordings:
        tokens, drawn = planned.num_tokens, sum(part.samples for part in planned.parts)
        by_name = {}
        for operation in recording.operations:
            if operation.cost.flops:
                by_name.setdefault((operation.layer, operation.name), []).append(operation.cost.flops)
        first = sum(flops for (at, name), some in by_name.items() if at == 0 and "linear" in name for flops in some)
        assert first == 2 * tokens * spec.hidden_size * (columns + mlp)
        logits = sum(flops for (at, name), some in by_name.items() if at is None and "linear" in name for flops in some)
        assert logits == 2 * max(drawn, 1) * spec.hidden_size * spec.vocab_size or not drawn
        parts = [part for part in planned.parts if part.kind == "prefill"]
        if parts:
            chunks += 1
            lengths = [part.start + part.num_tokens for part in parts]
            pairs = visible(lengths, [part.num_tokens for part in parts]).pairs
            assert by_name[1, "tritonllm.varlen_prefill_attention"] == [4 * heads * size * pairs]
        else:
            decodes += 1
    assert chunks >= 2 and decodes >= 2
    assert "= shared" in text


def test_the_default_steps_and_chosen_ones():
    llm = watched()
    _, text, recordings = look(llm, Wishes(), [PROMPT], greedy(6))
    assert [planned.step for planned, _ in recordings] == [1, 2]
    assert re.search(r"Not watched, a decode step took .* \(median of 4\)", text)
    assert "\x1b" not in text, "nobody's terminal"
    llm = watched()
    _, text, recordings = look(llm, Wishes(steps=(3, 99)), [PROMPT], greedy(6))
    assert [planned.step for planned, _ in recordings] == [3]
    assert "There was no step 99." in text


def test_nothing_is_left_behind(monkeypatch):
    llm = watched()
    look(llm, Wishes(), [PROMPT], greedy(3))
    assert modules_are_clean(llm.engine.model) and not tuning._seams and not llm.engine._events.heard
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    # a step that is broken off
    monkeypatch.setattr(llm.engine.model, "compute_logits", lambda hidden: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        look(llm, Wishes(), [PROMPT], greedy(3))
    monkeypatch.undo()
    assert modules_are_clean(llm.engine.model) and not tuning._seams
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert token_ids(llm.generate([PROMPT], greedy(3), use_tqdm=False)) == token_ids(
        watched().generate([PROMPT], greedy(3), use_tqdm=False)
    )


def test_what_cannot_be_counted_is_told_and_the_step_goes_on(monkeypatch):
    from tritonllm.teach.xray import costs

    monkeypatch.setitem(costs.FORMULAS, "aten.linear", lambda bound, result: 1 / 0)
    expected = token_ids(watched().generate([PROMPT], greedy(3), use_tqdm=False))
    outputs, text, recordings = look(watched(), Wishes(), [PROMPT], greedy(3))
    assert token_ids(outputs) == expected
    assert "Could not be counted: aten.linear: ZeroDivisionError" in text
    assert recordings[0][1].failures


def test_drafts_sampling_and_grammars():
    """Steps that verify, draw with every limit, and report log-probabilities."""
    draft = {"model": str(similar_checkpoint()), "num_speculative_tokens": 3, "adaptive": False}
    expected = token_ids(watched(speculative_config=draft).generate([PROMPT], greedy(12), use_tqdm=False))
    outputs, _, recordings = look(watched(speculative_config=draft), Wishes(), [PROMPT], greedy(12))
    assert token_ids(outputs) == expected
    assert not any(recording.failures for _, recording in recordings)
    limits = {"temperature": 0.9, "top_k": 9, "top_p": 0.9, "min_p": 0.01, "seed": 3, "repetition_penalty": 1.2}
    params = SamplingParams(max_tokens=4, n=2, logprobs=2, prompt_logprobs=1, **limits)
    expected = token_ids(watched().generate([PROMPT], params, use_tqdm=False))
    outputs, text, recordings = look(watched(), Wishes(), [PROMPT], params)
    assert token_ids(outputs) == expected
    assert not any(recording.failures for _, recording in recordings)
    assert "tritonllm.sample_edited" in text


@pytest.mark.filterwarnings("ignore:BitNetForCausalLM does not run natively")
def test_through_transformers(tmp_path):
    write_checkpoint(tmp_path, {**tiny_config("llama"), "model_type": WITHOUT_FAMILY}, config_style=5)
    llm = watched(checkpoint=tmp_path, skip_tokenizer_init=True, max_model_len=64)
    params = greedy(4, detokenize=False)
    expected = token_ids(llm.generate([PROMPT], params, use_tqdm=False))
    llm.reset_prefix_cache()
    file = tmp_path / "l.png"
    outputs, text, recordings = look(llm, Wishes(lens=(-2, file)), [PROMPT], params)
    assert token_ids(outputs) == expected and file.exists()
    for _, recording in recordings:
        assert not recording.failures
        stages = {operation.stage for operation in recording.operations if operation.layer == 1}
        assert {"self_attn.q_proj", "mlp.gate_proj", "mlp.down_proj"} <= stages
    assert "self_attn.q_proj" in text and "final norm" in text


def test_two_ranks(tmp_path):
    """Rank 0's part is shown; what would need the others is refused."""
    engine = SimpleNamespace(config=SimpleNamespace(), model=None)
    xray = XRay(Wishes(lens=(0, tmp_path / "l.png")), Console(file=io.StringIO()))
    xray._model = engine.model
    with pytest.raises(ValueError, match="tensor_parallel_size=1"):
        xray._check(2)


def test_the_roofline_is_measured():
    found = roofline.measure(CPU, torch.float32)
    assert found.bandwidth > 1e8 and found.peak > 1e8 and found.chip == "CPU"
    assert ROOF.ridge == 4
    assert ROOF.seconds(10**10, 10**9) == 1 and ROOF.seconds(1, 8 * 10**10) == 2 and ROOF.seconds(10**10, None) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--xray-steps", "1"], "--xray-steps needs --xray"),
        (["--xray", "--xray-steps", "0"], "--xray-steps must be numbers of steps"),
        (["--xray", "--xray-steps", "1,,2"], "--xray-steps must be numbers of steps"),
        (["--xray", "--xray-attention", "x", "a.png"], "LAYER[:HEAD] must be numbers"),
        (["--xray", "--xray-attention", "1", "a.svg"], "must end in .png"),
        (["--xray", "--xray-logit-lens", "x", "a.png"], "POSITION must be a number"),
        (["--xray", "--xray-logit-lens", "1", "no/folder/a.png"], "the folder 'no/folder' does not exist"),
    ],
)
def test_wrong_options(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["generate", "--prompt", "x", *arguments])
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_a_missing_package_is_named(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        main(["generate", "--prompt", "x", "--xray"])
    assert "pip install '.[teach]'" in capsys.readouterr().err


def test_what_the_options_say():
    given = SimpleNamespace(
        xray=True, xray_steps="5,2,5", xray_attention=["3:1", "a.png"], xray_logit_lens=["-4", "b.png"]
    )
    wishes = wishes_of(given)
    assert wishes.steps == (2, 5) and wishes.attention[:2] == (3, 1) and wishes.lens[0] == -4
    assert wishes_of(SimpleNamespace()) is None
    assert wishes_of(SimpleNamespace(xray=True, json=True)).to_stderr


def test_help_imports_none_of_it():
    script = "import sys; from tritonllm.cli import main\ntry: main(['generate', '--help'])\nexcept SystemExit: pass\n"
    script += "print(sorted({'torch', 'rich', 'textual', 'matplotlib'} & set(sys.modules)), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]" and "--xray-logit-lens POSITION FILE.png" in done.stdout


def test_the_code_of_the_page(capsys):
    page = (Path(__file__).parents[2] / "docs" / "teach.md").read_text(encoding="utf-8")
    (code,) = [c for c in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "teach.xray" in c]
    exec(code, {})
    assert "0 qkv aten.linear" in capsys.readouterr().out


def test_options_of_the_engine():
    """Of the command: no graphs, no asynchronous steps, no compiler."""
    assert dict(OPTIONS) == {"enforce_eager": True, "async_scheduling": False, "compilation_config": 0}


def test_nobody_reads():
    """As `| head` that has seen enough: no traceback, and the exit status of a broken pipe."""
    reads, writes = os.pipe()
    os.close(reads)
    words = ["-m", "tritonllm", "generate", "--xray", "--prompt", "There", "--max-tokens", "3"]
    process = forked_programs.Popen([sys.executable, *words], stdout=writes, stderr=subprocess.PIPE, text=True)
    os.close(writes)
    _, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, errors) == (141, "")


@pytest.mark.long
def test_a_session_at_a_terminal(tmp_path):
    command = ["-m", "tritonllm", "generate", "--xray", "--prompt", "There was a fox", "--max-tokens", "6"]
    files = ["--xray-attention", "0", f"{tmp_path}/a.png", "--xray-logit-lens", "-1", f"{tmp_path}/l.png"]
    session = pexpect.spawn(
        sys.executable, [*command, *files], encoding="utf-8", timeout=PATIENCE, dimensions=(50, 160)
    )
    for expected in (
        "Roofline of this CPU",
        "step 1: 4 tokens of 1 sequence",
        "embedding",
        "logits",
        "step 2: 1 token",
    ):
        session.expect_exact(expected)
    session.expect("Time of the step, by time.perf_counter")
    session.expect("Not watched, a decode step took")
    session.expect_exact(f"Wrote {tmp_path}/l.png")
    session.expect(pexpect.EOF)
    session.close()
    assert session.exitstatus == 0
    assert {path.name for path in tmp_path.iterdir()} == {"a.png", "l.png"}


def test_the_command_prints_the_same_text(capsys):
    words = ["generate", "--prompt", "There was a fox", "--max-tokens", "12", "--json"]
    assert main(words) == 0
    expected = re.search(r'"token_ids": \[[^]]*\]', capsys.readouterr().out)[0]
    assert main([*words, "--xray"]) == 0
    seen = capsys.readouterr()
    assert expected in seen.out and "step 1" not in seen.out
    assert "step 1" in seen.err and "MLP down" in seen.err


def test_a_recorder_of_a_model_alone():
    """Whoever wants the recording itself may take one."""
    llm = watched()
    engine = llm.engine
    engine.add_request("0", PROMPT, greedy(2))
    recorder = StageRecorder(engine.model, CPU)
    recorder.begin()
    engine.step()
    recording = recorder.end()
    assert isinstance(recording, Recording) and recording.clock == "time.perf_counter on the CPU"
    check(recording, layers=3)
    assert modules_are_clean(engine.model)
