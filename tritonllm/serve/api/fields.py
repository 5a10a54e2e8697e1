"""What becomes of the fields of a body, by one rule for every API.

A field that a body's class declares is supported there. Of the others, those of :data:`PROMPT`, :data:`GENERATION` and
:data:`POOLING` would change the answer, so they are errors unless they ask for nothing. The rest is ignored:
:data:`HARMLESS` fields, which cannot change the answer, and unknown ones. Clients send more of both with every release.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from tritonllm.config.sampling_params import OWN_FIELDS

logger = logging.getLogger(__name__)

Neutral = Mapping[str, tuple[Any, ...]]

# Fields that would change an answer where an API lacks them -> their values that ask for nothing, beside null. The name
# of a field within a field has its path.
PROMPT: Neutral = MappingProxyType(
    {  # what is asked
        "add_generation_prompt": (True,),
        "chat_template": (),
        "chat_template_kwargs": ({},),
        "continue_final_message": (False,),
        "conversation": (),
        "documents": ([],),
        "enable_thinking": (),
        "functions": ([],),
        "instructions": ("",),
        "mcp_servers": ([],),
        "messages": (),
        "mm_processor_kwargs": ({},),
        "previous_response_id": (),
        "prompt": (),
        "prompt_embeds": (),
        "suffix": ("",),
        "system": ("", []),
        "thread": (),
        "tools": ([],),
        "truncate_prompt_tokens": (),
        "truncation": ("disabled",),
    }
)
GENERATION: Neutral = MappingProxyType(
    {  # how the answer is sampled, and what it holds; of numbers the default of SamplingParams
        **{f.name: (f.default,) for f in OWN_FIELDS if type(f.default) in (int, float)},
        "add_special_tokens": (False,),
        "allowed_token_ids": ([],),
        "audio": (),
        "background": (False,),
        "bad_words": ([],),
        "best_of": (1,),
        "compaction": (),
        "early_stopping": (False,),
        "echo": (False,),
        "function_call": ("none",),
        "guided_choice": (),
        "guided_grammar": (),
        "guided_json": (),
        "guided_regex": (),
        "ignore_eos": (False,),
        "include_reasoning": (True,),
        "include_stop_str_in_output": (False,),
        "kv_transfer_params": (),
        "length_penalty": (1,),
        "logit_bias": ({},),
        "logits_processors": ([],),
        "logprobs": (False,),
        "max_completion_tokens": (),
        "max_output_tokens": (),
        "max_tokens": (),
        "modalities": (["text"],),
        "output_config": ({},),
        "output_format": (),
        "prompt_logprobs": (),
        "reasoning": ({},),
        "reasoning_effort": (),
        "repetition_detection": (),
        "response_format": ({"type": "text"},),
        "return_token_ids": (False,),
        "seed": (),
        "skip_special_tokens": (True,),
        "spaces_between_special_tokens": (True,),
        "stop": ([],),
        "stop_after_thought": (),
        "stop_sequences": ([],),
        "stop_token_ids": ([],),
        "structured_outputs": (),
        "temperature": (),
        "text": ({}, {"format": {"type": "text"}}),
        "text.verbosity": ("medium",),
        "thinking": (),
        "thinking_token_budget": (),
        "tool_choice": ("none", "auto"),
        "top_k": (-1, 0),
        "top_logprobs": (0,),
        "use_beam_search": (False,),
        "verbosity": ("medium",),
        "vllm_xargs": ({},),
        "web_search_options": (),
    }
)
POOLING: Neutral = MappingProxyType(
    {  # which numbers an embedding or a score has, and how they are written
        "add_special_tokens": (True,),
        "dimensions": (),
        "embed_dtype": ("float32",),
        "encoding_format": ("float",),
        "endianness": ("native", "little"),
        "input_type": (),
        "instruction": ("",),
        "late_chunking": (False,),
        "max_tokens_per_doc": (0,),
        "normalize": (),
        "task": (),
        "use_activation": (),
    }
)
STATELESS = "this server keeps no responses: send the whole conversation in input"
ADVICE: Mapping[str, str] = MappingProxyType(
    {  # a refused field -> what to do without it
        "conversation": STATELESS,
        "enable_thinking": 'use chat_template_kwargs={"enable_thinking": ...}',
        "functions": "use tools",
        "function_call": "use tool_choice",
        "guided_choice": "use structured_outputs",
        "guided_grammar": "use structured_outputs",
        "guided_json": "use structured_outputs",
        "guided_regex": "use structured_outputs",
        "output_format": "use output_config.format",
        "previous_response_id": STATELESS,
        "reasoning": "use reasoning_effort",
        "thinking": 'use chat_template_kwargs={"enable_thinking": ...}',
        "thread": "this server keeps no conversations: send the whole one in messages",
    }
)
# Known to change no answer here: they steer a provider's own service, say how to cache or how to send what is said.
HARMLESS = frozenset(
    (
        # OpenAI's
        *("access_programs", "background_options", "client_metadata", "image", "include", "max_tool_calls"),
        *("metadata", "moderation", "prediction", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
        *("reasoning.generate_summary", "reasoning.summary", "safety_identifier", "service_tier", "store"),
        *("stream_options", "stream_options.include_obfuscation", "user"),
        # Anthropic's
        *("billing_policy", "fallback_credit_token", "fallbacks", "user_profile_id", "workspace_id"),
        *("cache_control", "container", "context_management", "diagnostics", "inference_geo", "speed"),
        "thinking.display",
        # of this server, in bodies that cannot use them
        *("cache_salt", "parallel_tool_calls", "priority", "request_id"),
    )
)
NOT_HERE = ": not supported here: "
TOOLS = "tools."  # in front of a kind of tools that cannot be called, as if it were a field
MOST_NAMES = 64  # of unknown fields that are told apart: whoever sends a request chooses them
MOST_CHARACTERS = 64  # of a name in logs, metrics and errors
OTHERS = "(others)"  # the label of unknown fields beyond


def shown(name: str) -> str:
    """A field's name, which whoever sends a request chooses, as a log, a label and an error may hold it."""
    return ascii(name[:MOST_CHARACTERS])[1:-1][:MOST_CHARACTERS]


def asks_for_nothing(name: str, value: Any, refused: Neutral) -> bool:
    """Whether a field that is not supported may be left out without a word.

    Args:
        name: the name of the field, with its path.
        refused: fields that would change this answer.

    Raises:
        ValueError: it would change it.
    """
    if value is None:
        return True
    if name not in refused:
        return False
    if not any(value == neutral for neutral in refused[name]):
        raise ValueError(f"{name}{NOT_HERE}{ADVICE.get(name, 'leave it out')}")
    return True


def refused_field(message: str) -> str | None:
    """The field that an error of :func:`asks_for_nothing` is about; ``None`` for another error."""
    name, found, _ = message.partition(NOT_HERE)
    return name if found and name.isascii() and name.replace(".", "_").isidentifier() else None


class IgnoredFields:
    """Counts the requests with fields that were ignored; the first of each name is a line of the log.

    Args:
        count: is told the label of each of a request's.
    """

    def __init__(self, count: Callable[[str], None]) -> None:
        self._count = count
        self._seen: set[str] = set()
        self._room = MOST_NAMES

    def note(self, names: Iterable[str], path: str) -> None:
        """Count the ignored fields of one request, and log those that are new.

        Args:
            names: the names of the request's fields, each with its path.
            path: the path that was asked.
        """
        labels = set()  # each counts once a request, however often it comes
        for name in names:
            label = shown(name)
            known = label in self._seen or self._is_new(name, label, path)
            labels.add(label if known else OTHERS)
        for label in labels:
            self._count(label)

    def _is_new(self, name: str, label: str, path: str) -> bool:
        """Whether there is room for it."""
        if name in HARMLESS:
            self._seen.add(label)
            logger.info("%s: the field '%s' changes nothing here and is ignored", path, label)
            return True
        if not self._room:
            return False
        self._room -= 1
        self._seen.add(label)
        if name.startswith(TOOLS):
            logger.info("%s: tools of the kind '%s' cannot be called here and are left out", path, label)
        else:
            logger.warning("%s: the field '%s' is unknown and ignored (see --strict-fields)", path, label)
        if not self._room:
            logger.warning("other unknown fields are ignored without a line of the log, and counted as %s", OTHERS)
        return True
