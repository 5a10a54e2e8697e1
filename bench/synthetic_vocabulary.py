"""A byte-level BPE tokenizer of any size, made from a seed: for benchmarks of grammars where no real one can be had.

What a grammar's mask costs depends on how many tokens there are, how long they are and how many begin alike. So tokens
grow here as they do in a trained vocabulary: a token is a shorter one and one more character of its kind (letters
behind a blank or not, digits, punctuation, blanks, bytes of other scripts), and letters are as frequent as in English.
"""

import json
import random
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

LONGEST = 16  # characters of a token
LETTERS = dict(
    zip(
        "etaoinshrdlcumwfgypbvkjxqz",
        (127, 91, 82, 75, 70, 67, 63, 61, 60, 43, 40, 28, 28, 24, 24, 22, 20, 20, 19, 15, 10, 8, 2, 2, 1, 1),
        strict=True,
    )
)
CAPITALS, DIGITS, PUNCTUATION, BLANKS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ", "0123456789", "\"',.:;{}[]()-_=+*/\\#<>!?", "ĠĊĉ"
# kind: its characters, how many of a hundred tokens are of it, the longest
KINDS: dict[str, tuple[str, int, int]] = {
    "word": ("".join(LETTERS), 80, LONGEST),
    "digits": (DIGITS, 1, 3),
    "punctuation": (PUNCTUATION, 5, 4),
    "blanks": (BLANKS, 1, LONGEST),
    "bytes": ("", 13, 9),  # all others
}


def vocabulary(size: int, seed: int = 0) -> tuple[list[str], list[tuple[str, str]]]:
    """``size`` tokens, the 256 bytes first, and the merge that makes each of the others.

    Raises:
        ValueError: fewer tokens than bytes.
    """
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    if size < len(tokens):
        raise ValueError(f"size must be at least {len(tokens)}, one token for each byte, got {size}")
    generator, known, merges = random.Random(seed), set(tokens), []
    others = "".join(t for t in tokens if t not in (*LETTERS, *CAPITALS, *DIGITS, *PUNCTUATION, *BLANKS))
    stems = {kind: list(characters or others) for kind, (characters, _, _) in KINDS.items()}
    stems["word"] += [*CAPITALS, "Ġ"] * 4
    kinds, shares = list(KINDS), [share for _, share, _ in KINDS.values()]
    while len(tokens) < size:
        (kind,) = generator.choices(kinds, shares)
        stem = generator.choice(stems[kind])
        if len(stem) >= KINDS[kind][2]:
            continue
        if kind == "word":
            (character,) = generator.choices(list(LETTERS), list(LETTERS.values()))
        else:
            character = generator.choice(KINDS[kind][0] or others)
        token = stem + character
        if token not in known:
            known.add(token)
            tokens.append(token)
            merges.append((stem, character))
            stems[kind].append(token)
    return tokens, merges


def write_tokenizer(folder: Path, config: dict[str, Any], seed: int = 0) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` for a model's configuration, as transformers reads them.

    Args:
        folder: of the model.
        config: has ``bos_token_id`` and ``eos_token_id``, which lie behind the ordinary tokens.
    """
    ends = config["bos_token_id"], config["eos_token_id"]
    tokens, merges = vocabulary(min(ends), seed)
    model = models.BPE({token: i for i, token in enumerate(tokens)}, merges)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([f"<|special_{i}|>" for i in range(min(ends), max(ends) + 1)])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {name: f"<|special_{config[f'{name}_id']}|>" for name in ("bos_token", "eos_token")}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **names}))
