import json

import pytest
import torch
from safetensors.torch import save_file

from tritonllm.models.sentence_transformers import read_modules

CPU = torch.device("cpu")


def write(folder, kinds, **configs):
    """modules.json, with a config.json for those modules that have one."""
    modules = []
    for index, kind in enumerate(kinds):
        name = f"{index}_{kind.rpartition('.')[2]}"
        modules.append({"idx": index, "name": str(index), "path": name, "type": f"sentence_transformers.{kind}"})
        if kind in configs:
            (folder / name).mkdir()
            (folder / name / "config.json").write_text(json.dumps(configs[kind]))
    (folder / "modules.json").write_text(json.dumps(modules))
    return folder


def test_nothing_is_said(tmp_path):
    assert read_modules(tmp_path) is None


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False, "include_prompt": True}, "CLS"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": False}, "MEAN"),
        ({"pooling_mode_lasttoken": True}, "LAST"),
        ({"pooling_mode": "cls"}, "CLS"),
    ],
)
def test_pooling(tmp_path, config, pooling):
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 17, "do_lower_case": false}')
    found = read_modules(write(tmp_path, ["Transformer", "Pooling", "Normalize"], Pooling=config))
    assert (found.pooling, found.normalize, found.max_seq_length) == (pooling, True, 17)
    assert found.projection(dtype=torch.float32, device=CPU) is None


@pytest.mark.parametrize(
    ("kind", "config", "message"),
    [
        ("Pooling", {"pooling_mode_max_tokens": True}, "asks for pooling by max_tokens; one of"),
        ("Pooling", {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, "cls_token and mean_tokens"),
        ("Pooling", {}, "asks for pooling by nothing"),
        ("Dense", {"in_features": 3, "out_features": 0}, "in_features and out_features must be integers"),
        ("Dense", {"in_features": 3, "out_features": 2, "activation_function": "x.Mish"}, "activation_function Mish"),
        ("WordWeights", {}, "a module of type sentence_transformers.WordWeights is not supported"),
    ],
)
def test_what_is_not_known_is_refused(tmp_path, kind, config, message):
    with pytest.raises(ValueError, match=message):
        read_modules(write(tmp_path, [kind], **{kind: config}))


@pytest.mark.parametrize("content", ["{}", "[3]", "["])
def test_files_that_are_something_else(tmp_path, content):
    (tmp_path / "modules.json").write_text(content)
    with pytest.raises(ValueError, match=r"modules\.json"):
        read_modules(tmp_path)


def test_dense_layers(tmp_path):
    config = {"in_features": 4, "out_features": 3, "bias": False, "activation_function": "torch.nn.Identity"}
    folder = write(tmp_path, ["Dense"], Dense=config)
    weight = torch.randn(3, 4)
    save_file({"linear.weight": weight}, folder / "0_Dense" / "model.safetensors")
    x = torch.randn(5, 4)
    assert torch.allclose(read_modules(folder).projection(dtype=torch.float32, device=CPU)(x), x @ weight.T)
    save_file({"linear.weight": weight.T.contiguous()}, folder / "0_Dense" / "model.safetensors")
    with pytest.raises(ValueError, match=r"linear\.weight has shape \[4, 3\]; config.json asks for \[3, 4\]"):
        read_modules(folder).projection(dtype=torch.float32, device=CPU)


def test_a_folder_that_was_not_downloaded(tmp_path):
    with pytest.raises(ValueError, match=r"1_Pooling/config.json, which modules.json names, is not there"):
        read_modules(write(tmp_path, ["Transformer", "Pooling"]))


def test_dense_layers_that_do_not_fit_each_other(tmp_path):
    dense = {"in_features": 8, "out_features": 4}
    found = read_modules(write(tmp_path, ["Transformer", "models.Dense"], **{"models.Dense": dense}))
    found.check_sizes(8)
    with pytest.raises(ValueError, match="1_Dense: in_features is 8, but the vectors before it have 16"):
        found.check_sizes(16)
