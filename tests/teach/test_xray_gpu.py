"""What only a GPU shows: times by CUDA events, kernels that Triton launched, and what the tuning tables said."""

import io

import pytest
import torch
from rich.console import Console

from tritonllm import LLM, SamplingParams
from tritonllm.demo import model_path
from tritonllm.kernels.runtime import tuning
from tritonllm.teach.xray import draw, roofline
from tritonllm.teach.xray.lens import attention_pattern, logit_lens
from tritonllm.teach.xray.viewer import OPTIONS, XRay
from tritonllm.teach.xray.wishes import Wishes

pytestmark = pytest.mark.gpu
PROMPTS = ["There was a fox named", "Once upon a time there was a very small bear. " * 6]
PLAIN = ("tritonllm.norm", "tritonllm.activation", "tritonllm.qk_norm_rope_store")  # one kernel, its configuration's
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def llm():
    return LLM(str(model_path()), num_blocks=512, max_num_seqs=8, **OPTIONS)


def ids(outputs):
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def seen(llm):
    """``(outputs without, outputs with, text, recordings)``."""
    expected = ids(llm.generate(PROMPTS, PARAMS, use_tqdm=False))
    llm.reset_prefix_cache()
    recordings, text, plain = [], io.StringIO(), draw.print_step

    def keep(console, planned, recording, *others):
        recordings.append(recording)
        plain(console, planned, recording, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draw, "print_step", keep)
        xray = XRay(Wishes(), Console(file=text, width=200))
        outputs = xray.run(llm, lambda: llm.generate(PROMPTS, PARAMS, use_tqdm=False))
    return expected, ids(outputs), text.getvalue(), recordings


def test_the_tokens_are_the_same(seen):
    assert seen[0] == seen[1]


def test_every_operation_has_a_time_of_the_gpu(seen):
    _, _, text, (prefill, decode) = seen
    for recording in (prefill, decode):
        assert recording.clock == "CUDA events" and not recording.failures and recording.own == 0
        assert all(operation.seconds >= 0 for operation in recording.operations)
        assert 0 < recording.explained <= 1.1 * recording.seconds  # operations do not overlap
    assert "Time of the step, by CUDA events" in text


def test_launches_are_those_of_triton(seen):
    """Our operators launched kernels, or torch's product; with warps, a grid, and the configuration they chose."""
    recordings = seen[3]
    for recording in recordings:
        ours = [operation for operation in recording.operations if operation.name.startswith("tritonllm.")]
        launched = [launch for operation in ours for launch in operation.launches]
        assert launched
        for launch in launched:
            assert launch.name and launch.num_warps in (1, 2, 4, 8, 16) and all(size >= 1 for size in launch.grid)
        for operation in ours:
            assert all(choice.reason in operation.reason for choice in operation.choices)
            if operation.name in PLAIN:
                (choice,) = operation.choices
                assert choice.config["num_warps"] in {launch.num_warps for launch in operation.launches}
    attention = [o for o in recordings[0].operations if o.name == "tritonllm.varlen_prefill_attention"]
    assert attention and all(o.launches and o.choices for o in attention)


def test_the_reasons_name_tables_or_defaults(seen):
    reasons = {choice.reason for recording in seen[3] for o in recording.operations for choice in o.choices}
    slug = tuning.gpu_slug(tuning.name_in_tables(tuning.gpu_at(0)))
    assert reasons and all(reason.startswith(("table entry", "the default")) for reason in reasons)
    assert all(slug in reason for reason in reasons)


def test_the_roofline_of_a_gpu():
    found = roofline.measure(torch.device("cuda", 0), torch.bfloat16)
    assert found.chip == torch.cuda.get_device_name(0)
    assert found.bandwidth > 1e10 and found.peak > 1e11


def test_the_lens_on_a_gpu_is_that_of_the_cpu(llm):
    """The same model in float32 on the CPU says nearly the same, and its last layer exactly what the model draws."""
    cpu = LLM(str(model_path()), device="cpu", num_blocks=64, max_num_seqs=8)
    tokens = list(llm.engine.tokenizer.encode(PROMPTS[1]))
    for layer, head in ((0, 0), (3, 2)):
        weights = [
            attention_pattern(engine.model, next(engine.model.parameters()).device, tokens, layer, head)
            for engine in (llm.engine, cpu.engine)
        ]
        torch.testing.assert_close(weights[0], weights[1], rtol=0.1, atol=0.05)
        torch.testing.assert_close(weights[0].sum(1), torch.ones(len(tokens)))
    ours, theirs = (
        logit_lens(e.model, next(e.model.parameters()).device, tokens, -1) for e in (llm.engine, cpu.engine)
    )
    assert [guess.place for guess in ours] == [guess.place for guess in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        error = (mine.logits - other.logits).norm() / other.logits.norm()
        assert error < 0.05
    drawn = ids(llm.generate([{"prompt_token_ids": tokens}], PARAMS, use_tqdm=False))[0][0]
    assert ours[-1].top(1)[0][0] == drawn
