"""Where the results of ``tritonllm bench`` go, looked at before anything is measured."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any


def check_file(option: str, path: Path | None) -> None:
    """Check that a file can be written. Folders that are missing are made; a file that is there stays as it is.

    Args:
        option: the option that names the file, for the message.

    Raises:
        ValueError: the path is a folder, or cannot be written.
    """
    if path is None:
        return
    try:
        if path.is_dir():
            raise ValueError(f"{option}: {path} is a folder; name a file in it")
        if path.exists():
            if not os.access(path, os.W_OK):
                raise ValueError(f"{option}: {path} cannot be written: Permission denied")
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):  # also where permissions do not tell it
            pass
    except OSError as error:
        raise ValueError(f"{option}: {path} cannot be written: {error.strerror or error}") from error


def write_report(report: dict[str, Any], path: Path | None) -> None:
    """Write the results to a file, as JSON.

    Args:
        path: the file; ``None``: nothing is written.

    Raises:
        OSError: it cannot be written.
    """
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")
