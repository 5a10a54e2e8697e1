"""The forms of a prompt; names are vLLM's."""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict


class TextPrompt(TypedDict, total=False):
    """Text, and a salt that keeps its cached blocks from prompts with another."""

    prompt: str
    cache_salt: str


class TokensPrompt(TypedDict, total=False):
    """Token ids: a list, a NumPy array or a tensor of one dimension. ``prompt`` is the text that they came from;
    ``token_type_ids`` are the kinds of the tokens, for encoders that know some."""

    prompt_token_ids: Any
    token_type_ids: Any
    prompt: str
    cache_salt: str


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt
KNOWN_FORMS = "a string, a list or array of token ids, or a dict with 'prompt' or 'prompt_token_ids'"


def is_array(value: Any) -> bool:
    """A NumPy array or a tensor, or one of their integers (of dimension 0)."""
    return hasattr(value, "tolist") and hasattr(value, "ndim")


def is_token(value: Any) -> bool:
    return isinstance(value, int) or (is_array(value) and value.ndim == 0)


def holds_tokens(value: Any) -> bool:
    """What may be a list of token ids: a list, a tuple, an array, but no text."""
    return is_array(value) or (isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray))


def is_empty(value: Any) -> bool:
    """``None``, or nothing in it. (An array of several numbers is neither true nor false.)"""
    if is_array(value):
        return 0 in value.shape
    return not value


def to_list(ids: Any) -> list[int]:
    """Token ids as Python's own integers, whatever holds them.

    Raises:
        ValueError: an array of more or less than one dimension.
    """
    if is_array(ids):
        if ids.ndim != 1:
            raise ValueError(f"prompt_token_ids must have one dimension, got an array of shape {tuple(ids.shape)}")
        return ids.tolist()
    ids = list(ids)
    if ids and is_array(ids[0]):
        return [token.tolist() if is_array(token) else token for token in ids]
    return ids


def as_list(prompts: Any) -> list[Prompt]:
    """One prompt or several? Integers, or an array of one dimension, are one.

    Raises:
        ValueError: neither.
    """
    if isinstance(prompts, str | Mapping):
        return [prompts]  # type: ignore[list-item]
    if is_array(prompts):
        return [prompts] if prompts.ndim < 2 else list(prompts)
    if not isinstance(prompts, Sequence):
        raise ValueError(f"prompts must be a prompt or a list of prompts, got {type(prompts).__name__}")
    return [prompts] if prompts and is_token(prompts[0]) else list(prompts)


def check_text(name: str, text: str) -> None:
    """Whether it can be encoded: half of a surrogate pair, say, would be an error in the middle of a step.

    Raises:
        ValueError: it cannot; the message names the argument.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} is not valid Unicode text ({error.reason} at {error.start}): {text!r}") from error
