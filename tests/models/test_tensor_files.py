"""Reading checkpoint files: what headers say, which files count, and nothing from a file is ever run."""

import json
import pickle
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tritonllm.models.tensor_files import (
    StoredTensor,
    describe,
    open_tensors,
    weight_files,
)

TENSORS = {
    "a.weight": torch.randn(3, 5),
    "b": torch.randn(4).bfloat16(),
    "c": torch.randn(2, 2).half(),
    "d": torch.arange(3),
    "e": torch.tensor(1.0, dtype=torch.float64),
    "f": torch.arange(3, dtype=torch.uint8),
}
KINDS = ["model.safetensors", "pytorch_model.bin", "legacy.bin"]


def write(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    if path.suffix == ".safetensors":
        save_file(tensors, path)
    else:
        torch.save(tensors, path, _use_new_zipfile_serialization=path.name != "legacy.bin")
    return path


def write_index(folder: Path, index: str, files: dict[str, str]) -> None:
    (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": files}))


@pytest.mark.parametrize("kind", KINDS)
def test_headers_and_tensors(tmp_path, kind):
    path = write(tmp_path / kind, TENSORS)
    with open_tensors(path) as file:
        headers = file.headers()
        assert headers.keys() == TENSORS.keys()
        for name, tensor in TENSORS.items():
            assert headers[name].shape == tuple(tensor.shape) and headers[name].path == path
            assert torch.equal(file.get(name), tensor) and file.get(name).dtype == tensor.dtype
    dtypes = {name: header.dtype for name, header in headers.items()}
    known = {"a.weight": "F32", "b": "BF16", "c": "F16", "e": "F64", "f": "U8"}
    assert {name: dtypes[name] for name in known} == known and dtypes["d"] in ("I64", "int64")


@pytest.mark.parametrize("kind", ["model.safetensors", "pytorch_model.bin"])
def test_tensors_are_mapped_not_read(tmp_path, kind):
    """A change of the file after opening it shows."""
    path = write(tmp_path / kind, {"a": torch.zeros(4096)})
    with open_tensors(path) as file:
        content = bytearray(path.read_bytes())
        offset = content.rindex(bytes(4 * 4096))
        with path.open("r+b") as handle:
            handle.seek(offset)
            handle.write(torch.full((4096,), 2.0).numpy().tobytes())
        assert bool((file.get("a") == 2.0).all())


def test_num_bytes():
    assert [describe(TENSORS[name]).num_bytes for name in ("a.weight", "b", "c", "e")] == [60, 8, 8, 8]
    assert StoredTensor((2, 3), "F8_E4M3").num_bytes == 6 and StoredTensor((2, 3), "I32").num_bytes == 24


def test_a_sparse_tensor_is_described_as_one(tmp_path):
    path = write(tmp_path / "pytorch_model.bin", {"a": torch.eye(3).to_sparse()})
    with open_tensors(path) as file:
        assert file.headers()["a"].dtype == "torch.sparse_coo float32"


class Malicious:
    """Unpickled the ordinary way, this creates a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple:
        return (Path.touch, (self.marker,))


@pytest.mark.parametrize("kind", ["zip", "legacy", "pickle"])
def test_code_in_a_file_is_not_run(tmp_path, kind):
    marker, path = tmp_path / "marker", tmp_path / "pytorch_model.bin"
    content = {"a": torch.zeros(2), "b": Malicious(marker)}
    if kind == "pickle":
        path.write_bytes(pickle.dumps({"b": Malicious(marker)}, protocol=2))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=kind == "zip")
    with (
        pytest.raises(ValueError, match=r"holds more than tensors, and code in a file is never run"),
        open_tensors(path),
    ):
        pass
    assert not marker.exists()
    if kind == "zip":  # the file does what it is meant to
        torch.load(path, weights_only=False)
        assert marker.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([torch.zeros(2)], "must hold a dictionary of tensors, got list"),
        ({"state_dict": {"a": torch.zeros(2)}}, "must hold tensors by name, but 'state_dict' is dict"),
        ({1: torch.zeros(2)}, "must hold tensors by name, but 1 is Tensor"),
        ({"a": torch.zeros(2), "epoch": 3}, "must hold tensors by name, but 'epoch' is int"),
    ],
)
def test_more_than_a_dictionary_of_tensors(tmp_path, content, message):
    path = tmp_path / "pytorch_model.bin"
    torch.save(content, path)
    with pytest.raises(ValueError, match=message), open_tensors(path):
        pass


def test_parameters_are_tensors(tmp_path):
    path = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.nn.Parameter(torch.ones(2))}, path)
    with open_tensors(path) as file:
        assert file.headers()["a"].dtype == "F32" and file.get("a").tolist() == [1, 1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("keep", [0, 1, 4, 30, 300, -1, -200])
def test_truncated(tmp_path, kind, keep):
    path = write(tmp_path / kind, TENSORS)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"is (not a complete|damaged).*download it again"), open_tensors(path):
        pass


@pytest.mark.filterwarnings("ignore:Detected pickle protocol", "ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("kind", KINDS)
def test_damaged(tmp_path, kind):
    """Wrong bytes anywhere are an error of ours, or go unnoticed; never another exception."""
    path = write(tmp_path / kind, TENSORS)
    sound, draw, errors = path.read_bytes(), random.Random(0), 0
    for _ in range(200):
        content = bytearray(sound)
        for _ in range(3):
            content[draw.randrange(len(content))] = draw.randrange(256)
        path.write_bytes(content)
        try:
            with open_tensors(path) as file:
                file.headers()
        except ValueError as error:
            assert str(path) in str(error)
            errors += 1
    assert errors > 20


def test_which_files(tmp_path):
    one = r"{0}, or {0}\.index\.json with the files it names"
    both = one.format(r"model\.safetensors") + ", or " + one.format(r"pytorch_model\.bin")
    for load_format, expected in (("auto", both), ("pt", one.format(r"pytorch_model\.bin"))):
        with pytest.raises(ValueError, match=f"has no weights for load_format='{load_format}': expected {expected}$"):
            weight_files(tmp_path, load_format)
    files = ["pytorch_model.bin", "pytorch_model.bin.index.json", "model.safetensors", "model.safetensors.index.json"]
    named = [["pytorch_model.bin"], ["p1", "p2"], ["model.safetensors"], ["m1", "m2"]]
    for name in ("p1", "p2", "m1", "m2"):
        (tmp_path / name).touch()
    for file, want in zip(files, named, strict=True):  # each is preferred to those before it
        if file.endswith(".json"):
            write_index(tmp_path, file, {"b": want[1], "a": want[0], "c": want[1]})
        else:
            (tmp_path / file).touch()
        assert [path.name for path in weight_files(tmp_path)] == want
    assert [path.name for path in weight_files(tmp_path, "pt")] == ["p1", "p2"]
    assert [path.name for path in weight_files(tmp_path, "safetensors")] == ["m1", "m2"]


@pytest.mark.parametrize("index", ["model.safetensors.index.json", "pytorch_model.bin.index.json"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not valid JSON"),
        ("[]", "must hold a JSON object"),
        ("{}", "does not say where"),
        ('{"weight_map": 3}', "does not say where"),
        ('{"weight_map": {"a": 1}}', "does not say where"),
        ('{"weight_map": {"a": "gone"}}', "gone, named by .* does not exist; download the missing file"),
    ],
)
def test_bad_index(tmp_path, index, content, message):
    (tmp_path / index).write_text(content)
    with pytest.raises(ValueError, match=message):
        weight_files(tmp_path)
