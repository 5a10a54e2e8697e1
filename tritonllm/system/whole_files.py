"""Files that are there whole, as they were or as they are to be."""

from pathlib import Path
from uuid import uuid4


def replace_text(path: Path, text: str) -> None:
    """Write it beside the file and then in its place, so that whoever reads it sees the old one or the new one. A link
    in its place is replaced, and not followed; so is none beside it, where nobody can know the name before.

    Raises:
        OSError: it cannot be written. Nothing is left beside it.
    """
    beside = path.with_name(f"{path.name}.{uuid4().hex}.tmp")
    with beside.open("x", encoding="utf-8") as file:
        try:
            file.write(text)
            file.flush()
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)
