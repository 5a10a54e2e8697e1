"""What the router reads of a request: which model, what it begins with, and how much work it may be.

The body goes on as it came. Only the fields below are looked at, and those that can be long are not even decoded; a
body that is not JSON, or has other types in them, is left for the backend to refuse.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

BYTES_PER_TOKEN = 4  # of English text; loads are compared with each other, so a common factor does not matter
ANSWER_TOKENS = 256  # of a request that does not say how long its answer may be
MOST_TOKENS = 1 << 18  # of an answer; a client that asks for more cannot make its backend look fuller than that
USER = msgspec.Raw(b'"user"')
MOST_DIGITS = 30
MOST_COMMAS = 200_000  # of messages: texts have commas, too
GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/generate")
# What may be sent to a second backend although the first one may have begun: it only computes and keeps nothing.
COMPUTING = {
    *GENERATING,
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/v1/moderations",
    *(f"{version}/{name}" for version in ("", "/v1") for name in ("rerank", "score", "pooling", "classify")),
    "/v2/rerank",
    "/tokenize",
    "/detokenize",
}


class _Fields(msgspec.Struct):
    model: msgspec.Raw = msgspec.Raw()
    user: msgspec.Raw = msgspec.Raw()
    prompt_cache_key: msgspec.Raw = msgspec.Raw()
    n: msgspec.Raw = msgspec.Raw()
    max_tokens: msgspec.Raw = msgspec.Raw()
    max_completion_tokens: msgspec.Raw = msgspec.Raw()
    max_output_tokens: msgspec.Raw = msgspec.Raw()
    system: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()


class _Message(msgspec.Struct):
    role: msgspec.Raw = msgspec.Raw()


@dataclass(frozen=True)
class Ask:
    """A request, as far as the router has to know it.

    Args:
        method: the method of HTTP.
        path: the path with which the request came, decoded.
        target: path and query as they were sent.
        headers: without those that concern one connection only.
        body: as it came.
        request_id: the id that the client has given, or one that was made here.
        model: the name of the model in the body; ``None`` without one.
        key: what places it: the header, ``prompt_cache_key``, ``user``, or the beginning of the prompt; may be empty.
        tokens: about how many tokens the request will hold when it is done.
    """

    method: str
    path: str
    target: str
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    request_id: str
    model: str | None
    key: bytes
    tokens: int

    @property
    def repeatable(self) -> bool:
        """Whether doing it twice does no harm."""
        return self.method in ("GET", "HEAD", "OPTIONS") or self.path in COMPUTING


def read_fields(path: str, body: bytes, given_key: bytes, chars: int) -> tuple[str | None, bytes, int]:
    """``(model, key, tokens)`` of a request.

    Args:
        given_key: the value of the header that places requests; may be empty.
        chars: how many characters of the prompt's beginning make a key, as the body spells them.
    """
    try:
        fields = msgspec.json.decode(body, type=_Fields)
    except (msgspec.DecodeError, RecursionError):  # no JSON, or no object, or nested too deep
        fields = _Fields()
    model = _text(fields.model)
    key = given_key or _named(fields.prompt_cache_key) or _named(fields.user) or _beginning(fields)[:chars]
    return (
        model,
        key and (model or "").encode("utf-8", "surrogatepass") + b"\0" + key,
        max(1, len(body) and _tokens(path, fields)),
    )


def _text(raw: msgspec.Raw) -> str | None:
    """``None`` if it is none; what else it may be is not decoded."""
    if bytes(memoryview(raw)[:1]) != b'"':
        return None
    try:
        return msgspec.json.decode(raw, type=str)
    except msgspec.DecodeError:
        return None


def _named(raw: msgspec.Raw) -> bytes:
    return (_text(raw) or "").encode("utf-8", "surrogatepass")


def _beginning(fields: _Fields) -> bytes:
    """What all turns of a conversation begin with: up to the first message of the user. Of other prompts, all."""
    if fields.messages:
        text = bytes(fields.messages)
        if text.count(b",") > MOST_COMMAS or text[1:].lstrip(b" \t\r\n")[:1] != b"{":
            return text  # too many entries to look at each, or no messages
        try:
            messages = msgspec.json.decode(fields.messages, type=list[msgspec.Raw])
            for i, raw in enumerate(messages):
                if msgspec.json.decode(raw, type=_Message).role == USER:
                    return b",".join([bytes(fields.system), *map(bytes, messages[: i + 1])])
        except msgspec.DecodeError:  # no list, or one of other things than objects
            pass
        return text
    return bytes(fields.instructions) + (bytes(fields.prompt) or bytes(fields.input))


def _tokens(path: str, fields: _Fields) -> int:
    prompt = sum(map(length, (fields.system, fields.instructions, fields.prompt, fields.messages, fields.input)))
    if path not in GENERATING:
        return prompt
    limits = (fields.max_completion_tokens, fields.max_tokens, fields.max_output_tokens)
    answer = next((count for limit in limits if (count := _count(limit))), ANSWER_TOKENS)
    return prompt + min(answer * (_count(fields.n) or 1), MOST_TOKENS)


def _count(raw: msgspec.Raw) -> int:
    """An integer above 0; 0 if it is none. More than that is not told apart from :data:`MOST_TOKENS`."""
    text = bytes(memoryview(raw)[:MOST_DIGITS])
    return min(int(text), MOST_TOKENS) if text.isdigit() else 0


def length(raw: msgspec.Raw) -> int:
    """About how many tokens a text has; for a list of token ids, how many they are."""
    text = bytes(raw)
    begin = text[:16].replace(b" ", b"").replace(b"\n", b"").lstrip(b"[")
    if text.startswith(b"[") and begin[:1].isdigit():
        return text.count(b",") + 1
    return len(text) // BYTES_PER_TOKEN


def header_of(headers: Mapping[bytes, bytes], name: str) -> bytes:
    return headers.get(name.lower().encode("latin-1"), b"")
