"""The parts that answers are made of: usage, log-probabilities, events. Plain dictionaries, written as JSON."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tritonllm.config.sampling_params import ALL
from tritonllm.engine.data.outputs import CompletionOutput, Logprob, Logprobs, RequestOutput
from tritonllm.engine.text.detokenizer import IncrementalDetokenizer, bytes_of

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

    def of_chunk(self, last: bool, always: bool) -> dict[str, Any]:
        """The field ``usage`` of a chunk before the last one.

        Args:
            last: the last chunk will have it: the others have null.
            always: each chunk has it.
        """
        if always:
            return {"usage": self.as_dict()}
        return {"usage": None} if last else {}

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
    """Where a text's tokens begin in it, in characters: those that share a character begin where it does.

    Args:
        detokenizer: makes the text of them; ``None`` if there is no tokenizer.
        before: characters that the text has before them.
    """

    def __init__(self, detokenizer: IncrementalDetokenizer | None, before: int = 0) -> None:
        self._detokenizer, self._end = detokenizer, before

    def add(self, tokens: Sequence[int]) -> list[int]:
        """Where the next tokens begin."""
        begins = []
        for token in tokens:
            begins.append(max(0, self._end))
            self._end += len(_text(token, None, None) if self._detokenizer is None else self._detokenizer.append(token))
        return begins


def _text(token: int, logprob: Logprob | None, tokenizer: Any) -> str:
    if logprob is not None and logprob.decoded_token is not None:
        return logprob.decoded_token
    return f"token_id:{token}" if tokenizer is None else tokenizer.decode([token])


def _entry(token: int, logprob: Logprob, tokenizer: Any) -> dict[str, Any]:
    text = _text(token, logprob, tokenizer)
    return {"token": text, "logprob": _finite(logprob.logprob), "bytes": list(bytes_of(tokenizer, token, text))}


def _most_likely(position: Logprobs, count: int) -> list[tuple[int, Logprob]]:
    """The ``count`` most likely tokens of a position, in that order; with ``ALL`` those that it has."""
    most = len(position) if count == ALL else count
    ranked = [(token, entry) for token, entry in position.items() if entry.rank is not None and entry.rank <= most]
    return sorted(ranked, key=lambda item: item[1].rank or 0)


def chat_logprobs(
    tokens: Sequence[int], positions: Sequence[Logprobs] | None, top: int, tokenizer: Any
) -> dict[str, Any] | None:
    """``choices[].logprobs`` of a chat completion; ``None`` if none were asked for.

    Args:
        tokenizer: the tokenizer of the model; ``None`` if there is none.
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
    tokens: Sequence[int], positions: Sequence[Logprobs | None], begins: list[int], tokenizer: Any
) -> dict[str, Any]:
    """``choices[].logprobs`` of a completion.

    Args:
        begins: where the text of each token begins, see :class:`Offsets`.
        tokenizer: the tokenizer of the model; ``None`` if there is none.
    """
    result: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": begins}
    for token, position in zip(tokens, positions, strict=True):
        result["tokens"].append(_text(token, None if position is None else position[token], tokenizer))
        result["token_logprobs"].append(None if position is None else _finite(position[token].logprob))
        result["top_logprobs"].append(None if position is None else _by_text(position, tokenizer))
    return result


def _by_text(position: Logprobs, tokenizer: Any) -> Mapping[str, float]:
    """Log-probabilities by the tokens' texts. Where tokens have the same text, the first one's counts."""
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
