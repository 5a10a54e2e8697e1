"""Which sources ran: for results and tables. Imports no torch, since processes that only send requests import it."""

import subprocess
from pathlib import Path


def commit() -> str | None:
    """The commit that is checked out, with ``-dirty`` if files differ from it; without git what the file ``.commit``
    of an exported tree says, or None."""
    command = ["git", "describe", "--always", "--abbrev=12", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent)
    except (FileNotFoundError, subprocess.CalledProcessError):
        exported = Path(__file__).parents[1] / ".commit"
        return exported.read_text().strip() if exported.exists() else None
    return done.stdout.strip()
