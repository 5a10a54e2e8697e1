"""Where a checkpoint is, and its configuration files."""

import json
import re
from pathlib import Path
from typing import Any

from tritonllm.models.gguf.config import read_gguf_config
from tritonllm.models.gguf.folder import choose, in_folder, patterns
from tritonllm.models.gguf.header import is_gguf, library

# Top-level files only: some repositories hold a second copy of the weights in a folder or under another name.
_WANTED = ["*.json", "*.model", "*.txt", "*.jinja"]
_SAFETENSORS = ["*.safetensors"]
_UNWANTED = ["*/*", "consolidated*"]
_PYTORCH = ["pytorch_model*.bin"]  # by default only where there are no safetensors: many repositories have both
_WEIGHTS = {"auto": _SAFETENSORS, "safetensors": _SAFETENSORS, "pt": _PYTORCH, "dummy": []}  # by load_format
_MODULES = ["*_Pooling/config.json", "*_Dense/*"]  # folders that modules.json names
_CODE = ["*.py", "*.tiktoken"]  # and the vocabulary that only such tokenizers read
_GGUF_ID = re.compile(r"(?P<id>[\w.-]+/[\w.-]+)(:(?P<kind>[\w.-]+)|/(?P<file>[^:]+\.gguf))")


def resolve(
    model: str,
    revision: str | None = None,
    *,
    trust_remote_code: bool = False,
    load_format: str = "auto",
    download_dir: str | None = None,
) -> Path:
    """The folder of a checkpoint, or its GGUF file, downloaded if ``model`` is a hub id.

    Args:
        model: a folder, a GGUF file, or the id of a repository on the Hugging Face hub (``owner/name``); with the type
            of the GGUF file to take (``owner/name:Q4_K_M``), or with its name (``owner/name/file.gguf``).
        revision: branch, tag or commit of a hub id.
        trust_remote_code: download the repository's Python files too.
        load_format: download the weights that it reads.
        download_dir: the folder that keeps downloads; by default Hugging Face's own.

    Raises:
        ValueError: no such folder or repository, no access, or no connection and nothing in the local cache; or no GGUF
            file of that name or type, several, or the package ``gguf`` is not installed.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return in_folder(path) or path
    if path.is_file() and is_gguf(path):
        library()
        return path
    if path.exists():
        raise ValueError(
            f"model {model!r} is a file; give the folder that holds config.json, or a GGUF file (owner/name:Q4_K_M)"
        )
    named = _GGUF_ID.fullmatch(model)
    if named is not None:
        library()
        folder = _download(named["id"], revision, patterns(named["kind"], named["file"]), download_dir, [])
        return choose(folder, named["kind"], named["file"])
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        raise ValueError(f"model {model!r}: there is no such folder")
    wanted = _WANTED + _WEIGHTS[load_format] + (_CODE if trust_remote_code else [])
    folder = _download(model, revision, wanted, download_dir)
    if load_format == "auto" and not any(folder.glob("model*.safetensors")):  # an adapter's are not the model's
        folder = _download(model, revision, wanted + _PYTORCH, download_dir)
    if (folder / "modules.json").exists():
        folder = _download(model, revision, _MODULES, download_dir, [])
    return folder


def _download(
    model: str, revision: str | None, wanted: list[str], kept_in: str | None, unwanted: list[str] = _UNWANTED
) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        folder = snapshot_download(
            model, revision=revision, cache_dir=kept_in, allow_patterns=wanted, ignore_patterns=unwanted
        )
    except GatedRepoError as error:
        raise ValueError(f"model {model!r} asks you to accept its terms on the hub and to log in first") from error
    except RevisionNotFoundError as error:
        raise ValueError(f"model {model!r} has no revision {revision!r}") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ValueError(f"model {model!r} is neither a folder here nor a repository on the hub") from error
    except LocalEntryNotFoundError as error:
        raise ValueError(
            f"model {model!r} is not a folder here, not in the local cache, and the hub cannot be reached"
        ) from error
    except HfHubHTTPError as error:
        raise ValueError(f"model {model!r} could not be downloaded: {error}") from error
    except OSError as error:  # of the folder; the hub's own errors are above
        where = "Hugging Face's cache" if kept_in is None else f"download_dir={kept_in!r}"
        raise ValueError(f"model {model!r} cannot be kept in {where}: {error}") from error
    return Path(folder)


def read_config(path: Path) -> dict[str, Any]:
    """The contents of ``config.json``, or what a GGUF file says instead.

    Raises:
        ValueError: the file is absent or not a JSON object; for a GGUF file as
            :func:`~tritonllm.models.gguf.config.read_gguf_config`.
    """
    if is_gguf(path):
        return read_gguf_config(path)
    file = path / "config.json"
    if not file.exists():
        raise ValueError(
            f"{path} has no config.json; give a folder in Hugging Face format, or a GGUF file (owner/name:Q4_K_M)"
        )
    return read_json(file)


def read_generation_config(path: Path) -> dict[str, Any]:
    """The contents of ``generation_config.json``; empty if there is none.

    Raises:
        ValueError: the file is not a JSON object.
    """
    file = path / "generation_config.json"
    return read_json(file) if file.exists() else {}


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ValueError: the file cannot be read, or its content is not JSON, or not an object.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from error
    except RecursionError as error:
        raise ValueError(f"{file} is not valid JSON: it is nested too deep") from error
    except ValueError as error:  # UnicodeDecodeError and JSONDecodeError are
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} must hold a JSON object, got {type(content).__name__}")
    return content
