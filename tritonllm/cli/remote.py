"""What ``tritonllm chat --url`` and ``tritonllm bench serve`` share: a server's address, and what its answers say."""

import json
from typing import Any
from urllib.parse import urlsplit

# What comes of reading an answer that is not JSON, or JSON of another form than OpenAI's.
UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, RecursionError)


def base_of(option: str, url: str) -> str:
    """The address to which ``/v1/...`` is added; a path in it is kept, and ``/v1`` at its end may be there or not.

    Args:
        option: the option that gives the address, for the message.

    Raises:
        ValueError: no address of a server.
    """
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
        good = good and not parts.query and not parts.fragment
    except ValueError:  # a port that is no number, or brackets that do not close
        good = False
    if not good:
        instead = "http://127.0.0.1:8000" if not url or "//" in url else f"http://{url}"
        raise ValueError(f"{option} must begin with http:// or https://, as {instead}, got {url!r}")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def error_text(error: Any) -> str:
    """The text of the field ``error`` of an answer: an object with a message, as OpenAI has it, or a text, as others
    do."""
    if isinstance(error, dict) and "message" in error:
        return str(error["message"])
    return error if isinstance(error, str) else json.dumps(error)


def message_of(body: bytes) -> str:
    """What an answer says that is an error, or its beginning."""
    try:
        error = json.loads(body)["error"]
    except UNREADABLE:
        return body[:200].decode(errors="replace")
    return error_text(error)


def first_model(body: bytes) -> str:
    """The first name in an answer to ``/v1/models``.

    Raises:
        ValueError: it has none; the message says what it has.
    """
    try:
        name = json.loads(body)["data"][0]["id"]
    except UNREADABLE:
        name = None
    if not isinstance(name, str):
        raise ValueError(f"/v1/models brought no list of models, but: {message_of(body)}")
    return name
