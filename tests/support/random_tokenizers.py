"""Tokenizers whose vocabularies are pieces of texts, cut anywhere, and what these pieces say by the rules of UTF-8."""

import codecs
from collections.abc import Sequence
from functools import cache
from itertools import pairwise

from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from tritonllm.engine.text.detokenizer import SHOWN_AS

REPLACEMENT = "\ufffd"
SPECIAL = "</s>"
NAME_OF = {byte: character for character, byte in SHOWN_AS.items()}
# One to four bytes each, such that belong together, and U+FFFD itself.
TEXTS = st.text(st.sampled_from("ab  é–漢字नम\u0902\u094dक🦊\U0001f1eb\u200d\ufffd"), max_size=14)
Piece = bytes | str | None  # bytes, text, or the special token


class SlowTokenizer:
    """The same texts, but no tokenizers library behind it."""

    def __init__(self, tokenizer) -> None:
        self.decode = tokenizer.decode
        self.convert_ids_to_tokens = tokenizer.convert_ids_to_tokens


def made(names: Sequence[str], decoder, **options) -> PreTrainedTokenizerFast:
    """One with these tokens. The special one is token 0."""
    vocabulary = {name: i for i, name in enumerate(dict.fromkeys([SPECIAL, *names]))}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], **options))
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.add_special_tokens([AddedToken(SPECIAL, special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIAL, clean_up_tokenization_spaces=False)


def llama_decoder() -> decoders.Decoder:
    """That of Llama 2, Mistral and Phi-3; Gemma's strips nothing."""
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return decoders.Sequence(steps)


class ByteLevel:
    """As GPT-2 decodes: tokens are any bytes."""

    special: Piece = SPECIAL.encode()

    def tokenizer(self, pieces: Sequence[Piece]) -> tuple[PreTrainedTokenizerFast, list[int]]:
        """One that has the pieces as its tokens, and which these are."""
        names = [SPECIAL if piece is None else "".join(NAME_OF[byte] for byte in piece) for piece in pieces]
        tokenizer = made(names, decoders.ByteLevel())
        return tokenizer, tokenizer.convert_tokens_to_ids(names)

    def pieces(self, draw) -> list[Piece]:
        data = draw(TEXTS).encode()
        cuts = sorted({0, len(data), *draw(st.lists(st.integers(0, len(data)), max_size=len(data)))})
        pieces: list[Piece] = [data[a:b] for a, b in pairwise(cuts)]
        return _with(draw, pieces, st.none() | st.binary(min_size=1, max_size=3))

    def text(self, pieces: Sequence[Piece], whole: bool = False) -> str:
        """What they say, or the ``whole`` characters of it."""
        data = b"".join(piece for piece in pieces if piece is not None)
        text = data.decode(errors="replace")
        return text[:-1] if whole and unfinished(data) else text


class ByteFallback:
    """As Llama 2 decodes: tokens are texts or single bytes, and the first space of all is dropped."""

    special: Piece = SPECIAL

    def tokenizer(self, pieces: Sequence[Piece]) -> tuple[PreTrainedTokenizerFast, list[int]]:
        names = [self._name(piece) for piece in pieces]
        tokenizer = made([*(f"<0x{i:02X}>" for i in range(256)), *names], llama_decoder(), byte_fallback=True)
        return tokenizer, tokenizer.convert_tokens_to_ids(names)

    @staticmethod
    def _name(piece: Piece) -> str:
        if piece is None:
            return SPECIAL
        return f"<0x{piece[0]:02X}>" if isinstance(piece, bytes) else piece.replace(" ", "▁")

    def pieces(self, draw) -> list[Piece]:
        pieces: list[Piece] = []
        for text in draw(st.lists(TEXTS, max_size=6)):
            pieces += [text] if text and draw(st.booleans()) else [bytes([byte]) for byte in text.encode()]
        return _with(draw, pieces, st.none() | st.binary(min_size=1, max_size=1))

    def text(self, pieces: Sequence[Piece], whole: bool = False) -> str:
        """Of a run that is no text: the characters before the first wrong byte, and U+FFFD for each other one."""
        text, run = "", b""
        for piece in pieces:
            if isinstance(piece, bytes):
                run += piece
            elif piece is not None:
                text, run = text + self._run(run, text) + piece, b""
        if whole:
            run = run[: len(run) - unfinished(run)]
        return (text + self._run(run, text)).removeprefix(" ")

    @staticmethod
    def _run(run: bytes, before: str) -> str:
        try:
            return run.decode()
        except UnicodeDecodeError as error:
            start = 0 if not before and run[: error.start] == b" " else error.start  # the dropped space is not seen
            return run[:start].decode() + REPLACEMENT * (len(run) - start)


def _with(draw, pieces: list[Piece], others) -> list[Piece]:
    """The pieces and a few others between them."""
    for other in draw(st.lists(others, max_size=3)):
        pieces.insert(draw(st.integers(0, len(pieces))), other)
    return pieces


def unfinished(data: bytes) -> int:
    """How many bytes at the end may be the beginning of a character."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data)
    return len(decoder.getstate()[0])


# Decoders of tokens that are whole characters.
OTHERS = {
    "WordPiece": decoders.WordPiece("##", cleanup=True),
    "Metaspace": decoders.Metaspace("▁", "always"),
    "suffixes": decoders.BPEDecoder("</w>"),
    "Llama": llama_decoder(),
    "Gemma": decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
    "none": None,
}
WORDS = ["a", "▁", "▁a", "▁▁", "##a", "a</w>", ".", "漢", "▁漢", "🦊</w>", " ", "n't", SPECIAL]


@cache
def with_words(name: str) -> PreTrainedTokenizerFast:
    """One of these words with the decoder of this name."""
    return made(WORDS, OTHERS[name])
