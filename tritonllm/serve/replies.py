"""The parts that answers are made of: usage, log-probabilities, events. Plain dictionaries, written as JSON."""

import codecs
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tritonllm.engine.detokenizer import bytes_of
from tritonllm.engine.outputs import CompletionOutput, Logprob, Logprobs, RequestOutput

LEAST_LOGPROB = -9999.0  # JSON has no word for minus infinity
DONE = b"data: [DONE]\n\n"
_ENCODER = msgspec.json.Encoder()


def as_json(value: Any) -> bytes:
    return _ENCODER.encode(value)


def event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + _ENCODER.encode(value) + b"\n\n"


def named_event(name: str, value: Any) -> bytes:
    """One server-sent event with a name."""
    return b"event: " + name.encode() + b"\n" + event(value)


def now() -> int:
    return int(time.time())


@dataclass
class Usage:
    """Counts the tokens of an answer's requests; each prompt counts once, whatever ``n``."""

    prompts: dict[int, tuple[int, int]] = field(default_factory=dict)  # request: prompt tokens, of them cached
    completion_tokens: int = 0

    def add(self, index: int, output: RequestOutput) -> None:
        """Take in what is new of the request with this index."""
        self.prompts[index] = len(output.prompt_token_ids), output.num_cached_tokens
        self.completion_tokens += sum(len(completion.token_ids) for completion in output.outputs)

    def as_dict(self) -> dict[str, Any]:
        prompt, cached = (
            (sum(counts) for counts in zip(*self.prompts.values(), strict=True)) if self.prompts else (0, 0)
        )
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.completion_tokens,
            "total_tokens": prompt + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


def _finite(value: float) -> float:
    return value if math.isfinite(value) else LEAST_LOGPROB


class Offsets:
    """Where a text's tokens begin in it, in characters: those that share a character begin where it does."""

    def __init__(self) -> None:
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._end = 0

    def add(self, token: bytes) -> int:
        """Where the next token begins."""
        begin = self._end
        self._end += len(self._characters.decode(token))
        return begin


def _text(token: int, logprob: Logprob | None, tokenizer: Any) -> str:
    if logprob is not None and logprob.decoded_token is not None:
        return logprob.decoded_token
    return f"token_id:{token}" if tokenizer is None else tokenizer.decode([token])


def _entry(token: int, logprob: Logprob, tokenizer: Any) -> dict[str, Any]:
    text = _text(token, logprob, tokenizer)
    return {"token": text, "logprob": _finite(logprob.logprob), "bytes": list(bytes_of(tokenizer, token, text))}


def _most_likely(position: Logprobs, count: int) -> list[tuple[int, Logprob]]:
    """The ``count`` most likely tokens of a position, in that order."""
    ranked = [(token, entry) for token, entry in position.items() if entry.rank is not None and entry.rank <= count]
    return sorted(ranked, key=lambda item: item[1].rank or 0)


def chat_logprobs(
    tokens: Sequence[int], positions: Sequence[Logprobs] | None, top: int, tokenizer: Any
) -> dict[str, Any] | None:
    """``choices[].logprobs`` of a chat completion; ``None`` if none were asked for.

    Args:
        tokenizer: of the model; ``None`` if there is none.
    """
    if positions is None:
        return None
    return {
        "content": [
            {
                **_entry(token, position[token], tokenizer),
                "top_logprobs": [_entry(*item, tokenizer) for item in _most_likely(position, top)],
            }
            for token, position in zip(tokens, positions, strict=True)
        ],
    }


def completion_logprobs(
    tokens: Sequence[int], positions: Sequence[Logprobs | None] | None, offsets: Offsets, tokenizer: Any
) -> dict[str, Any] | None:
    """``choices[].logprobs`` of a completion; ``None`` if none were asked for.

    Args:
        offsets: have counted the tokens before these.
        tokenizer: of the model; ``None`` if there is none.
    """
    if positions is None:
        return None
    result: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token, position in zip(tokens, positions, strict=True):
        text = _text(token, None if position is None else position[token], tokenizer)
        result["tokens"].append(text)
        result["token_logprobs"].append(None if position is None else _finite(position[token].logprob))
        result["top_logprobs"].append(None if position is None else _by_text(position, tokenizer))
        result["text_offset"].append(offsets.add(bytes_of(tokenizer, token, text)))
    return result


def _by_text(position: Logprobs, tokenizer: Any) -> Mapping[str, float]:
    """Of tokens with the same text, the first counts."""
    texts: dict[str, float] = {}
    for token, logprob in position.items():
        texts.setdefault(_text(token, logprob, tokenizer), _finite(logprob.logprob))
    return texts


def ending(completion: CompletionOutput) -> dict[str, Any]:
    """Why it ended; OpenAI's field and vLLM's."""
    return {"finish_reason": completion.finish_reason, "stop_reason": completion.stop_reason}


def transfer(asked: Mapping[str, Any] | None, output: RequestOutput) -> dict[str, Any]:
    """vLLM's field that says where another engine finds the prompt's blocks; nothing if the request has not asked.

    Args:
        asked: the request's ``kv_transfer_params``.
        output: the last one of the request.
    """
    return {} if asked is None else {"kv_transfer_params": output.kv_transfer_params}


def prompt_logprobs(output: RequestOutput) -> list[dict[str, Any] | None] | None:
    """vLLM's field: for each position its tokens, by id."""
    if output.prompt_logprobs is None:
        return None
    return [
        None
        if position is None
        else {
            str(token): {"logprob": _finite(entry.logprob), "rank": entry.rank, "decoded_token": entry.decoded_token}
            for token, entry in position.items()
        }
        for position in output.prompt_logprobs
    ]
