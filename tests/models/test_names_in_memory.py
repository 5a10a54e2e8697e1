"""A trainer's weights under the names that transformers' model has in memory, which are not those of its files."""

from pathlib import Path

import pytest
import torch
from models.test_text_part import CASES
from models.test_text_part import write as write_with_images
from support.checkpoints import build
from support.tiny_models import ALL_FAMILIES, NOT_IN_TRANSFORMERS, load_decoder, tiny_config, write_checkpoint
from transformers import PreTrainedModel

from tritonllm.models.decoder import Decoder
from tritonllm.models.weights import WeightWriter, load_weights

# Another router's name; projections for one stacked one; the values' orientation; tied embeddings; no other name.
QUICK = ("phimoe", "sarvam_moe", "aria_text", "qwen3_moe", "gemma")
KNOWN = [family for family in ALL_FAMILIES if family not in NOT_IN_TRANSFORMERS]


def check(folder: Path, trained: PreTrainedModel) -> None:
    """Writing each tensor of the model in memory makes the decoder that its files make."""
    want = load_decoder(folder)
    got = Decoder(want.spec, dtype=torch.float32, device=torch.device("cpu"), max_model_len=8)
    for parameter in got.parameters():
        parameter.fill_(torch.nan)
    writer = WeightWriter(got)
    for name, tensor in trained.state_dict().items():
        writer.write(name, tensor)
    assert writer.complete
    filled = dict(got.named_parameters())
    for name, parameter in want.named_parameters():
        assert torch.equal(filled[name], parameter), name


@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=[] if family in QUICK else pytest.mark.long) for family in KNOWN]
)
def test_every_family(tmp_path, family):
    check(tmp_path, write_checkpoint(tmp_path, tiny_config(family)))


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case == "ernie4.5-vl" else pytest.mark.long) for case in CASES]
)
def test_models_of_more_than_text(tmp_path, case):
    """Of Aria and Llama 4, neither of which is tied, the output projection is in memory as in files."""
    check(tmp_path, write_with_images(tmp_path, case))


def test_files_may_have_these_names_too(tmp_path):
    """But not both for one weight."""
    trained = write_checkpoint(tmp_path, tiny_config("phimoe"))
    want = load_decoder(tmp_path).state_dict()
    (tmp_path / "model.safetensors").unlink()
    torch.save(trained.state_dict(), tmp_path / "pytorch_model.bin")
    got = load_decoder(tmp_path).state_dict()
    assert all(torch.equal(got[name], tensor) for name, tensor in want.items())
    router = trained.state_dict()["model.layers.0.mlp.router.weight"]
    both = {**trained.state_dict(), "model.layers.0.block_sparse_moe.gate.weight": router}
    torch.save(both, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"block_sparse_moe\.gate\.weight and .*router\.weight hold the same weights"):
        load_weights(build(tiny_config("phimoe")), tmp_path)


def test_one_of_three_projections_is_still_to_come(tmp_path):
    trained = write_checkpoint(tmp_path, tiny_config("sarvam_moe"))
    writer, state = WeightWriter(load_decoder(tmp_path)), trained.state_dict()
    for name in state:
        if not name.endswith("layers.1.self_attn.k_proj.weight"):
            writer.write(name, state[name])
    assert not writer.complete
