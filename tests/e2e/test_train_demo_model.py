"""The demo model's trainer from end to end, a few steps long: what it writes is what transformers and tests expect."""

import json
import sys
import tarfile
from pathlib import Path

import pytest
from support import forked_programs
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    script = [
        sys.executable,
        str(ROOT / "examples" / "train_demo_model.py"),
        "--quick",
        "--steps",
        "14",
        "--device",
        "cpu",
    ]
    command = [*script, "--workers", "1", "--out", str(folder), "--tar", str(folder / "demo.tar")]
    run = forked_programs.run(command, timeout=300)
    assert run.returncode == 0, run.stderr
    losses = [float(line.split("loss ")[1].split()[0]) for line in run.stdout.splitlines() if line.startswith("step")]
    assert len(losses) == 14 + 7  # the draft takes half as many steps
    assert losses[13] < losses[0] - 1
    assert losses[20] < losses[14] - 1
    return folder


@pytest.mark.parametrize("name", ["model", "draft"])
@pytest.mark.long
def test_a_folder_loads_through_the_auto_classes(out, name):
    model = AutoModelForCausalLM.from_pretrained(out / name)
    tokenizer = AutoTokenizer.from_pretrained(out / name)
    assert model.config.architectures == ["Qwen3ForCausalLM"]
    assert str(model.dtype) == "torch.bfloat16"
    assert model.generation_config.eos_token_id == [tokenizer.eos_token_id, tokenizer.pad_token_id]
    assert tokenizer.convert_ids_to_tokens(model.generation_config.eos_token_id) == ["<|im_end|>", "<|endoftext|>"]
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 47 + 38?"}], tokenize=False, add_generation_prompt=True
    )
    assert prompt == "<|im_start|>user\nWhat is 47 + 38?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(tokenizer(prompt).input_ids) == prompt
    assert (out / name / "README.md").read_text().startswith("---\nlicense: apache-2.0\n")


@pytest.mark.long
def test_the_draft_is_a_quarter_of_the_model_and_has_its_tokenizer(out):
    model, draft = (out / name / "model.safetensors" for name in ("model", "draft"))
    assert model.stat().st_size <= 6_000_000
    assert 0.2 < draft.stat().st_size / model.stat().st_size < 0.3
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (out / "model" / file).read_bytes() == (out / "draft" / file).read_bytes()


@pytest.mark.long
def test_everything_is_in_the_tar_file(out):
    names = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()} - {"demo.tar"}
    with tarfile.open(out / "demo.tar") as tar:
        assert {member.name for member in tar if member.isfile()} == names
    assert json.loads((out / "demo_eval.json").read_text()) == json.loads(
        (ROOT / "tests" / "e2e" / "demo_eval.json").read_text()
    )
