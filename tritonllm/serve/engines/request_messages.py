"""A tokenized request as the message that the engine process gets, and what collects what comes back of it."""

import copy
import json
from dataclasses import fields, replace
from typing import Any

from tritonllm.config.beam_search_params import BeamSearchParams
from tritonllm.config.pooling_params import PoolingParams
from tritonllm.config.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from tritonllm.engine.text.detokenizer import IncrementalDetokenizer
from tritonllm.engine.text.input_processor import TokenizedPrompt
from tritonllm.serve.engines.collector import Collector, Texts
from tritonllm.serve.engines.messages import Add, pack_params
from tritonllm.serve.engines.pooling_messages import PoolingCollector, pack_pooling_params


def generation(
    request_id: str, prompt: TokenizedPrompt, params: SamplingParams, priority: int, tokenizer: Any
) -> tuple[Add, Collector]:
    """A prompt that is continued. The engine sends what is new, and the collector makes of it what was asked for.

    Args:
        tokenizer: makes the text here where it can; ``None`` for token ids only.
    """
    wire, texts = copy.copy(params), _texts(prompt, params, tokenizer)
    wire.detokenize = params.detokenize and texts is None
    collector = Collector(prompt.text, prompt.token_ids, params.output_kind, texts)
    if params.output_kind is RequestOutputKind.CUMULATIVE:
        wire.output_kind = RequestOutputKind.DELTA
    wire.structured_outputs = _as_text(params.structured_outputs)
    return Add(request_id, *_facts(prompt), pack_params(wire), priority, bad_words=prompt.bad_words), collector


def pooling(
    request_id: str, prompt: TokenizedPrompt, params: PoolingParams, priority: int
) -> tuple[Add, PoolingCollector]:
    """A prompt that is pooled."""
    message = Add(
        *(request_id, *_facts(prompt), {}, priority),
        pooling=pack_pooling_params(params),
        token_type_ids=prompt.token_types,
    )
    return message, PoolingCollector(prompt.token_ids)


def search(request_id: str, prompt: TokenizedPrompt, params: BeamSearchParams, priority: int) -> tuple[Add, Collector]:
    """A prompt whose most likely continuations are searched for."""
    how = {field.name: getattr(params, field.name) for field in fields(params)}
    message = Add(request_id, *_facts(prompt), {}, priority, search=how)
    return message, Collector(prompt.text, prompt.token_ids, RequestOutputKind.FINAL_ONLY)


def _as_text(wish: StructuredOutputsParams | None) -> StructuredOutputsParams | None:
    """The wish with its schema as text, which the engine's loop compares with others without a look at its parts.

    Raises:
        ValueError: JSON cannot hold it.
    """
    if wish is None or wish.json is None or isinstance(wish.json, str):
        return wish
    try:
        return replace(wish, json=json.dumps(wish.json))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"structured_outputs: json is not a JSON schema: {error}") from error


def _facts(prompt: TokenizedPrompt) -> tuple[str | None, bytes, str | None]:
    return prompt.text, prompt.packed.tobytes(), prompt.cache_salt


def _texts(prompt: TokenizedPrompt, params: SamplingParams, tokenizer: Any) -> Texts | None:
    """What makes the text in this process; ``None`` if the engine does, which has to find stop strings in it."""
    if tokenizer is None or not params.detokenize or params.stop_strings:
        return None
    token_ids = prompt.token_ids
    options = {
        "skip_special_tokens": params.skip_special_tokens,
        "spaces_between_special_tokens": params.spaces_between_special_tokens,
    }
    keep_end = params.include_stop_str_in_output
    return Texts(lambda: IncrementalDetokenizer(tokenizer, token_ids, **options), keep_end=keep_end)
