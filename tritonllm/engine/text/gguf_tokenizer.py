"""The tokenizer that a GGUF file holds, built with the package ``tokenizers``.

Two kinds are known: byte-level BPE with merges (``gpt2``), and sentencepiece's BPE (``llama``), whose merges follow
from the pieces. How the first kind splits a text before it merges is not in the file, only llama.cpp's name for it
(``tokenizer.ggml.pre``).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tritonllm.models.gguf.header import read_header, shards

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # types of tokens
_SPACE = "▁"  # sentencepiece's
_MERGED_FROM = 2  # characters
_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}

# What the patterns of OpenAI's tiktoken have in common: a word with what stands before it, numbers, signs, spaces.
_SHORTENED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BY_CASE = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{{0}}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{{0}}"


def _cl100k(numbers: str) -> str:
    return rf"{_SHORTENED}|{_WORD}|{numbers}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"


def _o200k(numbers: str, behind: str) -> str:
    return rf"{_BY_CASE.replace('{0}', behind)}|{numbers}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


@dataclass(frozen=True, kw_only=True)
class _Splits:
    """How a text is split before merges.

    Attributes:
        pattern: what a part looks like; empty for GPT-2's.
        digits: digits stand alone, before the pattern is applied.
        composed: characters are composed first (Unicode's NFC).
        whole_first: a part that is a token is not merged from pieces.
        begins: texts begin with the token of beginnings, unless the file says otherwise.
    """

    pattern: str = ""
    digits: bool = False
    composed: bool = False
    whole_first: bool = False
    begins: bool = False


_GPT2, _DIGITS = _Splits(), _Splits(digits=True)
_LLAMA3 = _Splits(pattern=_cl100k(r"\p{N}{1,3}"), whole_first=True, begins=True)
_QWEN2 = _Splits(pattern=_cl100k(r"\p{N}"), composed=True)
_GPT4O = _Splits(pattern=_o200k(r"\p{N}{1,3}", rf"{_SHORTENED}?"))
_TEKKEN = _Splits(pattern=_o200k(r"\p{N}", ""), whole_first=True, begins=True)
SPLITS: Mapping[str, _Splits] = {
    "gpt-2": _GPT2,
    "smollm": _DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "pixtral": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "gpt-4o": _GPT4O,
    "tekken": _TEKKEN,
}


def gguf_tokenizer(path: Path) -> Any:
    """The tokenizer of the model of which ``path`` is a file, as transformers' fast tokenizer, with its chat template.

    Raises:
        ValueError: the file is damaged, or has no tokenizer or one of another kind.
    """
    from transformers import PreTrainedTokenizerFast

    path = shards(path)[0]
    values = read_header(path).metadata
    tokens = values.get("tokenizer.ggml.tokens")
    kind = values.get("tokenizer.ggml.model")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens):
        raise ValueError(f"{path} has no tokens")
    kinds = values.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise ValueError(f"{path} has {len(tokens)} tokens, but not so many of their types")
    if kind == "gpt2":
        name = str(values.get("tokenizer.ggml.pre"))
        if name not in SPLITS:
            raise ValueError(f"{path} splits texts by the rule {name!r}; known: {', '.join(SPLITS)}")
        splits = SPLITS[name]
        tokenizer, begins = _byte_level(tokens, values.get("tokenizer.ggml.merges") or [], splits), splits.begins
    elif kind == "llama":
        prefix = bool(values.get("tokenizer.ggml.add_space_prefix", True))
        tokens = [_piece(token, of) for token, of in zip(tokens, kinds, strict=True)]
        tokenizer, begins = _sentencepiece(tokens, kinds, prefix), True
    else:
        raise ValueError(f"{path} has a tokenizer of the kind {kind!r}; known: gpt2, llama")
    roles = {role: _token(tokens, values.get(f"tokenizer.ggml.{name}_token_id")) for role, name in _ROLES.items()}
    _add(tokenizer, tokens, kinds, {token for token in roles.values() if token is not None})
    bos = roles["bos_token"] if values.get("tokenizer.ggml.add_bos_token", begins) else None
    eos = roles["eos_token"] if values.get("tokenizer.ggml.add_eos_token", False) else None
    _surround(tokenizer, bos, eos)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=values.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **{role: token for role, token in roles.items() if token is not None},
    )


def _token(tokens: Sequence[str], index: Any) -> str | None:
    return tokens[index] if isinstance(index, int) and 0 <= index < len(tokens) else None


def _piece(token: str, kind: int) -> str:
    """A run of spaces as sentencepiece writes it: converters write the ones that users defined with spaces."""
    return _SPACE * len(token) if kind == _USER_DEFINED and token and not token.strip(" ") else token


def _byte_level(tokens: Sequence[str], merges: Sequence[str], splits: _Splits) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    vocabulary = {token: index for index, token in enumerate(tokens)}
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=splits.whole_first))
    if splits.composed:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if splits.digits else []
    if splits.pattern:
        steps.append(pre_tokenizers.Split(Regex(splits.pattern), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not splits.pattern))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(tokens: Sequence[str], kinds: Sequence[int], prefix: bool) -> Any:
    """``prefix``: a text begins with a space that it does not have."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocabulary = {token: index for index, token in enumerate(tokens)}
    unknown = next((token for token, kind in zip(tokens, kinds, strict=True) if kind == _UNKNOWN), None)
    pairs = _merges(vocabulary, {tokens[i] for i, kind in enumerate(kinds) if kind in (_UNKNOWN, _CONTROL)})
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefix else spaces
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _merges(vocabulary: Mapping[str, int], apart: set[str]) -> list[tuple[str, str]]:
    """Every pair of pieces that makes a piece, the pairs of earlier pieces first: sentencepiece numbers pieces in the
    order of their scores."""
    pairs: list[tuple[str, str]] = []
    for token in vocabulary:
        if len(token) >= _MERGED_FROM and token not in apart:
            cuts = ((token[:at], token[at:]) for at in range(1, len(token)))
            known = [pair for pair in cuts if pair[0] in vocabulary and pair[1] in vocabulary]
            pairs += sorted(known, key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
    return pairs


def _add(tokenizer: Any, tokens: Sequence[str], kinds: Sequence[int], roles: set[str]) -> None:
    """Tokens that are found in a text before it is split. Control tokens leave no text."""
    from tokenizers import AddedToken

    found = []
    for token, kind in zip(tokens, kinds, strict=True):
        control = kind in (_UNKNOWN, _CONTROL) or token in roles
        if control or (kind == _USER_DEFINED and token.strip(_SPACE)):
            found.append(AddedToken(token, special=control, normalized=False))
    tokenizer.add_tokens([token for token in found if not token.special])
    tokenizer.add_special_tokens([token for token in found if token.special])


def _surround(tokenizer: Any, bos: str | None, eos: str | None) -> None:
    from tokenizers import processors

    special = [(token, tokenizer.token_to_id(token)) for token in dict.fromkeys((bos, eos)) if token is not None]
    if special:
        around = [[bos and f"{bos}:{i}", f"${name}:{i}", eos and f"{eos}:{i}"] for i, name in enumerate("AB")]
        first, second = (" ".join(filter(None, parts)) for parts in around)
        tokenizer.post_processor = processors.TemplateProcessing(
            single=first, pair=f"{first} {second}", special_tokens=special
        )
