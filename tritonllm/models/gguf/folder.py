"""Which GGUF file of a folder, or of a repository, a user means."""

import re
from pathlib import Path

from tritonllm.models.gguf.header import SUFFIX, library

_LATER = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")  # all but the first file of a model in several


def patterns(kind: str | None, file: str | None) -> list[str]:
    """What to download of a repository: the files of a type (``Q4_K_M``), or one file with those beside it.

    Args:
        kind: the type, in any case; ``None`` if there is a file.
        file: the file's path in the repository.
    """
    if kind is None:
        assert file is not None
        return [re.sub(r"-\d{5}-of-(\d{5}\.gguf)$", r"-*-of-\1", file)]
    spellings = dict.fromkeys((kind, kind.upper(), kind.lower()))
    return [f"*{name}{end}" for name in spellings for end in (SUFFIX, f"-*-of-*{SUFFIX}", f"/*{SUFFIX}")]


def choose(folder: Path, kind: str | None = None, file: str | None = None) -> Path:
    """The first file of the model that a user means in a folder.

    Args:
        kind: the type, as its file's name ends, or the folder's that it lies in.
        file: its path in the folder, instead.

    Raises:
        ValueError: there is none, or several.
    """
    if file is not None:
        if not (folder / file).is_file():
            raise ValueError(f"{folder} has no file {file}")
        return folder / file
    found = _models(folder, "**/*")
    wanted = [path for path in found if kind is None or _is_of(path, folder, kind.lower())]
    if len(wanted) != 1:
        names = ", ".join(str(path.relative_to(folder)) for path in found) or "none"
        of_kind = "" if kind is None else f" of type {kind}"
        raise ValueError(f"{folder} must have one GGUF model{of_kind}; its files: {names}")
    return wanted[0]


def in_folder(folder: Path) -> Path | None:
    """The GGUF file of a folder; ``None`` where there is none, or there are a model's other files, too.

    Raises:
        ValueError: there are several models, or the package ``gguf`` is not installed.
    """
    found = _models(folder, "*")
    has_weights = any(path.suffix in (".safetensors", ".bin") for path in folder.iterdir()) if found else False
    if not found or (has_weights and (folder / "config.json").exists()):
        return None
    library()
    if len(found) > 1:
        raise ValueError(f"{folder} has several GGUF models: give one, of {', '.join(path.name for path in found)}")
    return found[0]


def _models(folder: Path, within: str) -> list[Path]:
    """The first files of models; those of projectors, which are no language models, are left out."""
    files = sorted(path for path in folder.glob(f"{within}{SUFFIX}") if path.is_file())
    return [path for path in files if not _LATER.search(path.name) and not path.name.lower().startswith("mmproj")]


def _is_of(path: Path, folder: Path, kind: str) -> bool:
    stem = re.sub(r"-\d{5}-of-\d{5}$", "", path.name.removesuffix(SUFFIX)).lower()
    ends = stem == kind or (stem.endswith(kind) and stem[-len(kind) - 1] in "-._")
    return ends or (path.parent != folder and path.parent.name.lower().endswith(kind))
