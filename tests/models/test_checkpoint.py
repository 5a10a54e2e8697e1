import sys
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import errors

from tritonllm.cli import info
from tritonllm.models import checkpoint


class FakeResponse:
    """What the hub's exceptions ask of a response."""

    def __init__(self) -> None:
        self.headers: dict[str, str] = {}
        self.request = None
        self.status_code = 404
        self.text = ""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Replace the download; returns the list of its calls, and what it does: fail, or bring these files."""
    calls: list[tuple[str, dict]] = []
    outcome: dict[str, BaseException | list[str]] = {"is": ["model.safetensors"]}

    def download(model: str, **kwargs) -> str:
        calls.append((model, kwargs))
        if isinstance(outcome["is"], BaseException):
            raise outcome["is"]
        folder = tmp_path / "downloaded"
        folder.mkdir(exist_ok=True)
        for file in kept(outcome["is"], kwargs):
            (folder / file).touch()
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return calls, outcome


def kept(files: list[str], patterns: dict) -> list[str]:
    """Those of a repository that the hub's library downloads."""
    names = ("allow_patterns", "ignore_patterns")
    return list(huggingface_hub.utils.filter_repo_objects(files, **{name: patterns[name] for name in names}))


def test_folder(tmp_path, hub):
    assert checkpoint.resolve(str(tmp_path)) == tmp_path
    assert hub[0] == []


def test_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert checkpoint.resolve("~/model") == tmp_path / "model"


@pytest.mark.parametrize("model", ["./nothing", "/no/such/folder", "../nothing", "a/b/c", "~/nothing"])
def test_no_such_folder(model, hub):
    with pytest.raises(ValueError, match="there is no such folder"):
        checkpoint.resolve(model)
    assert hub[0] == []


def test_file(tmp_path):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ValueError, match="is a file; give the folder"):
        checkpoint.resolve(str(tmp_path / "model.safetensors"))


def test_hub_id(hub, tmp_path):
    calls, _ = hub
    assert checkpoint.resolve("owner/name", revision="v2") == tmp_path / "downloaded"
    ((model, kwargs),) = calls
    assert (model, kwargs["revision"]) == ("owner/name", "v2")


def test_downloads_are_kept_where_the_user_says(hub, tmp_path):
    """All of a repository's: its own files, and the folders of its modules."""
    hub[1]["is"] = ["config.json", "modules.json", "pytorch_model.bin"]
    checkpoint.resolve("owner/name", download_dir="kept")
    checkpoint.resolve("owner/name")
    assert [kwargs["cache_dir"] for _, kwargs in hub[0]] == ["kept"] * 3 + [None] * 3
    (tmp_path / "file").touch()
    hub[1]["is"] = NotADirectoryError(20, "Not a directory")
    with pytest.raises(ValueError, match=r"cannot be kept in download_dir='a/file': .*Not a directory"):
        checkpoint.resolve("owner/name", download_dir="a/file")


@pytest.mark.parametrize(
    ("file", "wanted"),
    [
        ("config.json", True),
        ("model-00001-of-00002.safetensors", True),
        ("model.safetensors.index.json", True),
        ("tokenizer.model", True),
        ("merges.txt", True),
        ("chat_template.jinja", True),
        ("pytorch_model.bin", False),
        ("original/consolidated.00.pth", False),
        ("onnx/model.safetensors", False),
        ("consolidated.safetensors", False),
        ("README.md", False),
        ("modeling_other.py", False),
        ("setup/modeling_other.py", False),
    ],
)
def test_which_files_are_downloaded(hub, file, wanted):
    checkpoint.resolve("owner/name")
    ((_, patterns),) = hub[0]
    assert bool(kept([file], patterns)) == wanted


def test_folders_of_modules_are_downloaded_where_there_are_some(hub):
    calls, outcome = hub
    outcome["is"] = ["modules.json", "model.safetensors"]
    checkpoint.resolve("owner/name", revision="v2")
    files = ["1_Pooling/config.json", "2_Dense/model.safetensors", "onnx/model.safetensors", "README.md"]
    assert [kept(files, kwargs) for _, kwargs in calls] == [[], files[:2]]
    assert calls[1][1]["revision"] == "v2"


@pytest.mark.parametrize("trust", [True, False])
def test_code_is_downloaded_only_when_asked(hub, trust):
    checkpoint.resolve("owner/name", trust_remote_code=trust)
    ((_, patterns),) = hub[0]
    assert (
        kept(["modeling_other.py", "a.tiktoken", "sub/b.py"], patterns) == ["modeling_other.py", "a.tiktoken"] * trust
    )


@pytest.mark.parametrize("safetensors", [[], ["model.safetensors"], ["model-00001-of-00002.safetensors"]])
def test_pytorch_files_are_downloaded_where_nothing_else_is(hub, tmp_path, safetensors):
    pytorch = ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json"]
    others = ["training_args.bin", "optimizer.bin", "original/pytorch_model.bin", "tf_model.h5"]
    hub[1]["is"] = ["config.json", *safetensors, *pytorch, *others]
    checkpoint.resolve("owner/name", revision="v2", trust_remote_code=True)
    files = {path.name for path in (tmp_path / "downloaded").iterdir()}
    common = {"config.json", "pytorch_model.bin.index.json"}
    assert files == common | set(safetensors or pytorch)
    assert all(kwargs["revision"] == "v2" and "*.py" in kwargs["allow_patterns"] for _, kwargs in hub[0])


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (errors.RepositoryNotFoundError("no", response=FakeResponse()), "neither a folder here nor a repository"),
        (errors.HFValidationError("bad"), "neither a folder here nor a repository"),
        (errors.GatedRepoError("gated", response=FakeResponse()), "asks you to accept its terms"),
        (errors.RevisionNotFoundError("no", response=FakeResponse()), "has no revision 'v9'"),
        (errors.LocalEntryNotFoundError("offline"), "the hub cannot be reached"),
        (errors.HfHubHTTPError("500 server error", response=FakeResponse()), "could not be downloaded: 500"),
    ],
)
def test_hub_errors(hub, error, message):
    hub[1]["is"] = error
    with pytest.raises(ValueError, match=message) as raised:
        checkpoint.resolve("owner/name", revision="v9")
    assert "'owner/name'" in str(raised.value) and raised.value.__cause__ is error


def test_a_folder_needs_no_hub_library(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert checkpoint.resolve(str(tmp_path)) == tmp_path


def test_read_config(tmp_path):
    with pytest.raises(ValueError, match=r"has no config\.json"):
        checkpoint.read_config(tmp_path)
    file = tmp_path / "config.json"
    file.write_text('{"a": 1}')
    assert checkpoint.read_config(tmp_path) == {"a": 1}
    file.write_text('{"a": ')
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        checkpoint.read_config(tmp_path)
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        checkpoint.read_config(tmp_path)
    file.write_text("[]")
    with pytest.raises(ValueError, match="must hold a JSON object, got list"):
        checkpoint.read_config(tmp_path)


def test_read_generation_config(tmp_path):
    assert checkpoint.read_generation_config(tmp_path) == {}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    assert checkpoint.read_generation_config(tmp_path) == {"eos_token_id": [1, 2]}


@pytest.mark.parametrize(
    ("load_format", "expected"),
    [("auto", "model.safetensors"), ("safetensors", "model.safetensors"), ("pt", "pytorch_model.bin"), ("dummy", None)],
)
def test_the_weights_that_are_read_are_downloaded(hub, tmp_path, load_format, expected):
    hub[1]["is"] = ["config.json", "model.safetensors", "pytorch_model.bin"]
    checkpoint.resolve("owner/name", load_format=load_format)
    files = {path.name for path in (tmp_path / "downloaded").iterdir()}
    assert files == {"config.json", expected} - {None}


def test_what_a_model_is_made_of_is_told_without_its_weights(hub, tmp_path):
    hub[1]["is"] = ["config.json", "model.safetensors"]
    with pytest.raises(ValueError, match="is not valid JSON"):  # the fake hub's is empty
        info.model_rows("owner/name")
    assert [path.name for path in (tmp_path / "downloaded").iterdir()] == ["config.json"]


def test_an_adapters_weights_are_not_the_models(hub, tmp_path):
    hub[1]["is"] = ["adapter_model.safetensors", "pytorch_model.bin"]
    checkpoint.resolve("owner/name")
    assert (tmp_path / "downloaded" / "pytorch_model.bin").exists()


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ValueError, match=r"config.json cannot be read: Is a directory"):
        checkpoint.read_config(tmp_path)
    deep = tmp_path / "generation_config.json"
    deep.write_text('{"a":' * 100_000)
    with pytest.raises(ValueError, match="nested too deep"):
        checkpoint.read_generation_config(tmp_path)
