"""What is wrong with a model folder is said at the door: the file, tensor or argument by name, and a way out."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engines import tiny_checkpoint, tiny_llm

from tritonllm import LLM
from tritonllm.engine.start.resolve import resolve_dtype


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(tiny_checkpoint(), tmp_path / "model")


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_tensors(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def refuse(folder, message, **kwargs):
    with pytest.raises(ValueError, match=message):
        LLM(str(folder), **kwargs)


def test_no_such_folder(tmp_path):
    refuse(tmp_path / "nothing", "no such folder")


def test_no_config(folder):
    (folder / "config.json").unlink()
    refuse(folder, r"no config\.json")


@pytest.mark.parametrize(
    ("architecture", "model_type", "message"),
    [
        ("T5ForConditionalGeneration", "t5", "it is an encoder-decoder model"),
        ("LlavaForConditionalGeneration", "llava", "it is a multimodal model"),
        ("ElectraForMaskedLM", "electra", "it is not a causal language model"),
        ("MambaForCausalLM", "mamba", "linear_attention"),
        ("NobodysForCausalLM", "nobodys", "does not know model_type='nobodys'"),
    ],
)
def test_what_no_decoder_can_run(folder, architecture, model_type, message):
    edit_config(folder, architectures=[architecture], model_type=model_type)
    refuse(folder, f"{architecture} does not run natively and cannot run through transformers either: .*{message}")


def test_truncated_weights(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    refuse(folder, r"model\.safetensors")


def test_no_weights(folder):
    (folder / "model.safetensors").unlink()
    refuse(folder, "safetensors")


def test_missing_tensor(folder):
    edit_tensors(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    refuse(folder, r"model\.layers\.1\.mlp\.up_proj\.weight")


def test_leftover_tensor(folder):
    edit_tensors(folder, lambda tensors: tensors.update({"model.layers.9.extra": torch.zeros(2)}))
    refuse(folder, r"model\.layers\.9\.extra")


def test_wrong_shape(folder):
    edit_tensors(folder, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(3)}))
    refuse(folder, r"model\.norm\.weight")


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_weights_that_are_no_numbers(folder, value):
    """Said with the tensor's name and how many; whoever wants them can have them."""
    name = "model.layers.1.mlp.up_proj.weight"
    edit_tensors(folder, lambda tensors: tensors[name][3, 4:6].fill_(value))
    refuse(folder, rf"tensor {name} has 2 values that are NaN or infinite in float32: .*allow_nan=True")
    assert LLM(str(folder), allow_nan=True, num_blocks=8).engine is not None


def test_weights_that_overflow_in_another_dtype(folder):
    edit_tensors(folder, lambda tensors: tensors["model.norm.weight"][:1].fill_(1e5))
    refuse(folder, r"tensor model\.norm\.weight has 1 values .* in float16", dtype="float16")


TEMPLATE_ERRORS = {
    "{{ messages[0]['content'": r"not valid Jinja: .*line 1",
    "{{ user.name }}": r"cannot render these messages: 'user' is undefined",
    "{{ raise_exception('the system role is not supported') }}": "these messages: the system role is not supported",
    "{{ 'a' + messages[0]['content'] + 1 }}": "cannot render these messages: can only concatenate",
    "{{ 1 / 0 }}": "cannot render these messages: division by zero",
}


@pytest.mark.parametrize("template", TEMPLATE_ERRORS)
def test_a_chat_template_that_fails(template):
    with pytest.raises(ValueError, match=TEMPLATE_ERRORS[template]):
        tiny_llm().chat([{"role": "system", "content": "hi"}], chat_template=template, use_tqdm=False)


def test_no_tokenizer(folder):
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    refuse(folder, "skip_tokenizer_init=True")
    assert LLM(str(folder), skip_tokenizer_init=True).get_tokenizer() is None


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", "[]"),
        ("tokenizer.json", "{}"),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", "null"),
        ("tokenizer_config.json", '{"extra_special_tokens": 7}'),
    ],
)
def test_a_damaged_tokenizer(folder, file, text):
    (folder / file).write_text(text)
    refuse(folder, r"tokenizer: none could be loaded from .*skip_tokenizer_init=True")


def test_a_tokenizer_that_the_tokenizers_package_refuses(folder):
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "decoder": {"type": "x"}}))
    refuse(folder, r"tokenizer: none could be loaded from .*Decoder")


def test_dtype_that_the_device_lacks():
    half, brain = torch.float16, torch.bfloat16
    with pytest.raises(ValueError, match=r"dtype='bfloat16' needs a GPU of compute capability 8\.0"):
        resolve_dtype("bfloat16", "cuda", (7, 5), brain)
    assert resolve_dtype("auto", "cuda", (7, 5), brain) is half
    assert resolve_dtype("auto", "cuda", (9, 0), brain) is brain
    assert resolve_dtype("auto", "cpu", (0, 0), brain) is torch.float32
    assert resolve_dtype("auto", "cpu", (0, 0), brain, bfloat16_on_cpu=True) is brain
    assert resolve_dtype("auto", "cpu", (0, 0), half, bfloat16_on_cpu=True) is torch.float32
    assert resolve_dtype("auto", "cpu", (0, 0), torch.float32, bfloat16_on_cpu=True) is torch.float32
    assert resolve_dtype("bfloat16", "cpu", (0, 0), half) is brain
