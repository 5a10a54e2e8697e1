"""Loading a tokenizer, with errors that say what to do."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tritonllm.system.starting import no_searches

# One of these holds the tokens; without any, transformers makes an empty tokenizer and says nothing.
VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
DAMAGED = (OSError, ValueError, LookupError, TypeError, AttributeError, ImportError)
TOO_LONG = "sequence-length-is-longer-than-the-specified-maximum"  # what transformers warns of, once a tokenizer
GGUF = ".gguf"
WAY_OUT = "Pass tokenizer= with a folder that has one, or skip_tokenizer_init=True to work with token ids"


def load_tokenizer(
    name: str, *, revision: str | None = None, trust_remote_code: bool = False, download_dir: str | None = None
) -> Any:
    """The tokenizer of a folder, GGUF file or hub id. It does not warn of long texts, as transformers' others do.

    Args:
        revision: branch, tag or commit of a hub id.
        trust_remote_code: run Python code that comes with it.
        download_dir: the folder that keeps downloads; by default Hugging Face's own.

    Raises:
        ValueError: no tokenizer there, or one that cannot be read.
    """
    folder = Path(os.path.expanduser(name))
    is_file = folder.suffix == GGUF and folder.is_file()
    name = str(folder) if folder.is_dir() else name
    if folder.is_dir() and not trust_remote_code and not any((folder / file).exists() for file in VOCABULARY_FILES):
        raise ValueError(f"tokenizer: {name!r} has none of {', '.join(VOCABULARY_FILES)}. {WAY_OUT}")
    from huggingface_hub.errors import StrictDataclassError

    with no_searches():
        from transformers import AutoTokenizer  # a second of import time that token-id mode does not need

    # of a damaged file transformers may ask for anything, and the package tokenizers has no class of errors of its own;
    # that of a config.json with a null where none may be is of no kind in DAMAGED
    try:
        tokenizer = (
            _of_gguf(folder)
            if is_file
            else AutoTokenizer.from_pretrained(
                name, revision=revision, trust_remote_code=trust_remote_code, cache_dir=download_dir
            )
        )
    except Exception as error:
        if type(error) is not Exception and not isinstance(error, (*DAMAGED, StrictDataclassError)):
            raise
        raise ValueError(
            f"tokenizer: none could be loaded from {name!r} ({type(error).__name__}: {error}). {WAY_OUT}"
        ) from error
    # the length of prompts is checked here, against max_model_len, and a long one is never run
    warned = getattr(tokenizer, "deprecation_warnings", None)
    if isinstance(warned, dict):
        warned[TOO_LONG] = True
    return tokenizer


def _of_gguf(file: Path) -> Any:
    from tritonllm.engine.text.gguf_tokenizer import gguf_tokenizer  # the API server imports models/ for it alone

    return gguf_tokenizer(file)


def render_template(tokenizer: Any, conversation: Sequence[Mapping[str, Any]], **options: Any) -> str:
    """What the chat template makes of a conversation.

    Args:
        options: ``chat_template`` and ``add_generation_prompt`` of the tokenizer's ``apply_chat_template``.

    Raises:
        ValueError: the template is no Jinja, asks for what the messages lack, or refuses them; with its own words.
    """
    from jinja2 import TemplateError, TemplateSyntaxError

    try:
        return tokenizer.apply_chat_template(conversation, tokenize=False, **options)
    except TemplateSyntaxError as error:
        raise ValueError(f"the chat template is not valid Jinja: {error.message} (line {error.lineno})") from error
    except RecursionError as error:
        raise ValueError("the chat template cannot render these messages: they are nested too deep") from error
    # a template is a program: what it does with a message that it does not expect can be any of these
    except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"the chat template cannot render these messages: {error}") from error


def bad_word_ids(tokenizer: Any, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """Token sequences of each word, at the start of a text and after a space. In one call of the tokenizer: 1,024 words
    take a tenth of the time that they take one by one."""
    texts = dict.fromkeys(text for word in words for text in (word, " " + word.lstrip()))
    found = tokenizer(list(texts), add_special_tokens=False)["input_ids"] if texts else ()
    return tuple(dict.fromkeys(tuple(ids) for ids in found if ids))
