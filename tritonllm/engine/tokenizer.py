"""Loading a tokenizer, with errors that say what to do."""

from pathlib import Path
from typing import Any

# One of these holds the tokens; without any, transformers makes an empty tokenizer and says nothing.
VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
WAY_OUT = "Pass tokenizer= with a folder that has one, or skip_tokenizer_init=True to work with token ids"


def load_tokenizer(name: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a folder or hub id.

    Raises:
        ValueError: no tokenizer there, or one that cannot be read.
    """
    folder = Path(name)
    if folder.is_dir() and not trust_remote_code and not any((folder / file).exists() for file in VOCABULARY_FILES):
        raise ValueError(f"tokenizer: {name!r} has none of {', '.join(VOCABULARY_FILES)}. {WAY_OUT}")
    from transformers import AutoTokenizer  # a second of import time that token-id mode does not need

    try:
        return AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ValueError(
            f"tokenizer: none could be loaded from {name!r} ({type(error).__name__}: {error}). {WAY_OUT}"
        ) from error


def bad_word_ids(tokenizer: Any, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """Token sequences of each word, at the start of a text and after a space."""
    sequences = []
    for word in words:
        for text in (word, " " + word.lstrip()):
            ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            if ids and ids not in sequences:
                sequences.append(ids)
    return tuple(sequences)
