"""Texts that a grammar allows, drawn token by token from its masks, and whether it allows a text."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import xgrammar

from tritonllm.config.sampling_params import StructuredOutputsParams
from tritonllm.engine.grammar.grammar import parse

WORDS = [
    '",',
    '"}',
    '"]',
    'a"',
    "aa",
    "aaaa",
    '{"',
    '": "',
    ", ",
    ",\n  ",
    "\n    ",
    "   ",
    '\\"',
    "\\u00",
    "true",
    "12",
    "0.0",
]
VOCABULARY: list[str | bytes] = [*(bytes([byte]) for byte in range(256)), *WORDS, "<end>"]  # each byte, so each text
END = len(VOCABULARY) - 1
MASK_WORDS = -(-len(VOCABULARY) // 32)


def compiler() -> Any:
    kind = xgrammar.VocabType.RAW
    info = xgrammar.TokenizerInfo(VOCABULARY, vocab_type=kind, stop_token_ids=[END])
    return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


def compiled(compiler: Any, **wish: Any) -> Any:
    return compiler.compile_grammar(parse(StructuredOutputsParams(**wish)))


def allowed(matcher: Any) -> list[int]:
    mask = np.zeros((1, MASK_WORDS), dtype=np.int32)
    matcher.fill_next_token_bitmask(mask)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[: len(VOCABULARY)]).tolist()


def _bytes(token: int) -> bytes:
    word = VOCABULARY[token]
    return word if isinstance(word, bytes) else word.encode()


def random_text(grammar: Any, seed: int, most: int = 400) -> str | None:
    """A whole text; ``None`` if it has not ended after so many tokens. It prefers what ends something."""
    matcher, drawn, rng = xgrammar.GrammarMatcher(grammar), b"", random.Random(seed)
    closing = [*b'"}]', END]
    for _ in range(most):
        tokens = allowed(matcher)
        assert tokens, f"nothing may follow {drawn!r}"
        ends: Sequence[int] = [token for token in closing if token in tokens]
        token = rng.choice(ends if ends and rng.random() < 0.3 else tokens)
        assert matcher.accept_token(token)
        if token == END:
            return drawn.decode()
        drawn += _bytes(token)
    return None


def allows(grammar: Any, text: str) -> bool:
    """Byte by byte."""
    matcher = xgrammar.GrammarMatcher(grammar)
    return all(matcher.accept_token(byte) for byte in text.encode()) and matcher.accept_token(END)
