"""Token ids of texts of which much has come before: the next turn of a chat, questions behind one system prompt.

To tokenize takes about 2 us a token: 65 ms for a chat of 32,768 tokens, whose keys and values the prefix cache has. But
before anything else a tokenizer cuts a text at its special tokens (``<|im_start|>``), and what lies between two of them
becomes tokens by itself. So each piece, a special token and what follows it up to the next, is kept with its tokens. A
piece that has come before is looked up, and only the others are tokenized.

Which tokenizers work so is tried and not concluded: some treat the beginning of a text in another way than that of a
piece. Where pieces would give other tokens than the whole, and where a tokenizer cannot say what it cuts at, texts are
tokenized whole.
"""

import re
import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from tritonllm.engine.data.request import PACKED

MOST_BYTES = 32 << 20  # of all pieces that are kept, with their tokens: some two million of these
ENTRY_BYTES = 250  # of a dictionary's entry and of the two objects in it
# Of so many new pieces that are so short, each costs more than it saves: 60,000 of 16 characters take 2.2 s, one text
# of them 0.9.
MANY, SHORT = 256, 64
# From so many characters on, some 5 ms, new pieces are given to the tokenizer together: it has threads for them, for
# whose start few wait longer than for their tokens where processors are busy.
TOGETHER = 1 << 14
PROBES = ("{0}", "a b{0}c d {1} e\n\n f{0}{1}g", " {0}\n h{1}", "i  {0} \u00e9 {0}{0}\u4e2d\u6587 {1}\t")


class PieceStore:
    """Pieces and their tokens, those that were used last. It can be used by several threads.

    Args:
        most_bytes: how many bytes all pieces may take together; one piece may take a quarter of it.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most = most_bytes
        self._bytes = 0
        self._tokens: OrderedDict[str, array[int]] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, pieces: Sequence[str]) -> "list[array[int] | None]":
        """The tokens of each piece; ``None`` for one that is not kept."""
        with self._lock:
            found = [self._tokens.get(piece) for piece in pieces]
            for piece, tokens in zip(pieces, found, strict=True):
                if tokens is not None:
                    self._tokens.move_to_end(piece)
        return found

    def keep(self, piece: str, tokens: "array[int]") -> None:
        """Keep one more, and forget those that were not used for longest."""
        size = _size(piece, tokens)
        with self._lock:
            if 4 * size > self._most or piece in self._tokens:  # another thread was first
                return
            self._tokens[piece] = tokens
            self._bytes += size
            while self._bytes > self._most:
                self._bytes -= _size(*self._tokens.popitem(last=False))


def _size(piece: str, tokens: "array[int]") -> int:
    return sys.getsizeof(piece) + len(tokens) * tokens.itemsize + ENTRY_BYTES


class TextPieces:
    """Makes tokens of texts as ``tokenizer.encode`` does.

    Args:
        tokenizer: a transformers tokenizer; nobody else uses it at the same time. Where its tokens are changed (more of
            them, others around a text), it is tried again.
        store: keeps pieces; only of tokenizers that are the same.

    Attributes:
        works: texts are tokenized in pieces. If not, they are tokenized whole.
    """

    def __init__(self, tokenizer: Any, store: PieceStore | None = None) -> None:
        self._tokenizer = tokenizer
        self._try(PieceStore() if store is None else store)

    def _try(self, store: PieceStore) -> None:
        self._store, self._facts = store, _facts_of(self._tokenizer)
        self._around: tuple[list[int], list[int]] = [], []  # special tokens before and behind a text
        self.works = False
        try:
            cuts = _cuts_of(self._tokenizer)
            self._cut = re.compile("|".join(map(re.escape, cuts)))
            self.works = bool(cuts) and self._probe(cuts)
        except Exception:  # of a tokenizer that cannot tokenize what is tried; tokenizers has no class of its own
            self.works = False

    def copied(self, tokenizer: Any) -> "TextPieces":
        """A copy that uses ``tokenizer``, which must be equal to this one's, for another thread."""
        return TextPieces(tokenizer, self._store)

    def encode(self, text: str, add_special_tokens: bool = True, *, keep: bool = True) -> list[int]:
        """Token ids of a text.

        Args:
            add_special_tokens: whether to add the special tokens that the tokenizer sets around a text.
            keep: whether to store new pieces.
        """
        if self._facts != _facts_of(self._tokenizer):
            self._try(PieceStore())
        pieces = self._split(text) if self.works else []
        if len(pieces) < 2:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        found = self._store.find(pieces)
        new = list(dict.fromkeys(piece for piece, tokens in zip(pieces, found, strict=True) if tokens is None))
        if len(new) > MANY and sum(map(len, new)) < SHORT * len(new):
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        made = {piece: array(PACKED, ids) for piece, ids in zip(new, self._encode_each(new), strict=True)}
        if keep:
            for piece, ids in made.items():
                self._store.keep(piece, ids)
        before, behind = self._around if add_special_tokens else ([], [])
        tokens = array(PACKED, before)
        for piece, known in zip(pieces, found, strict=True):
            tokens += made[piece] if known is None else known
        return [*tokens, *behind]

    def _split(self, text: str) -> list[str]:
        """The pieces of a text: what stands before the first special token, if anything does, and one from each on."""
        starts = [match.start() for match in self._cut.finditer(text)]
        if not starts or starts[0] > 0:
            starts.insert(0, 0)
        return [text[start:end] for start, end in zip(starts, [*starts[1:], len(text)], strict=True)]

    def _encode_each(self, pieces: list[str]) -> Sequence[Sequence[int]]:
        if sum(map(len, pieces)) < TOGETHER:
            return [self._tokenizer.encode(piece, add_special_tokens=False) for piece in pieces]
        options = {"return_attention_mask": False, "return_token_type_ids": False}
        return self._tokenizer(pieces, add_special_tokens=False, **options)["input_ids"]

    def _probe(self, cuts: Sequence[str]) -> bool:
        """Whether some texts with each of the cuts have the same tokens in pieces and whole."""
        plain, whole = (self._tokenizer.encode("a", add_special_tokens=add) for add in (False, True))
        at = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), None)
        if not plain or at is None:
            return False
        before, behind = self._around = whole[:at], whole[at + len(plain) :]
        for first, second in zip(cuts, [*cuts[1:], cuts[0]], strict=True):
            for text in (probe.format(first, second) for probe in PROBES):
                ids = [id_ for piece in self._encode_each(self._split(text)) for id_ in piece]
                whole = self._tokenizer.encode(text, add_special_tokens=False)
                if ids != whole or [*before, *ids, *behind] != self._tokenizer.encode(text):
                    return False
        return True


def _facts_of(tokenizer: Any) -> tuple[Any, ...]:
    """What changes with a tokenizer's tokens, in a microsecond."""
    names = ("split_special_tokens", "add_bos_token", "add_eos_token")
    length = getattr(tokenizer, "__len__", int)  # also one that something stands for
    return (length(), *(getattr(tokenizer, name, None) for name in names))


def _cuts_of(tokenizer: Any) -> list[str]:
    """The special tokens at which texts are cut, the longest first, as of two that begin at one place the longer one
    counts: those that a chat has, and that are found wherever they stand in a text as it is given. Not one if the
    tokenizer does not say."""
    if not getattr(tokenizer, "is_fast", False) or getattr(tokenizer, "split_special_tokens", False):
        return []
    added = [token for token in tokenizer.added_tokens_decoder.values() if token.content and not token.normalized]
    if any(token.single_word for token in added):  # found between words, for which the ends of a piece would count
        return []
    named, template = {*tokenizer.all_special_tokens}, str(tokenizer.chat_template)
    cuts = {
        token.content
        for token in added
        if (token.content in named or token.content in template)
        and token.content == token.content.strip()  # so that one beside it, which takes spaces, takes no part of it
        and not (token.lstrip or token.rstrip)
    }
    return sorted(cuts - _covered(cuts, [token.content for token in added]), key=len, reverse=True)


def _covered(tokens: set[str], others: Sequence[str]) -> set[str]:
    """The tokens of ``tokens`` that may be a part of another one in a text, or begin inside of it. (A tokenizer may
    have 6,000 others, of which few have the first character of one of these behind their own.)"""
    first, beginnings = {token[0] for token in tokens}, tuple(tokens)
    covered = set()
    for other in others:
        if not first.isdisjoint(other[1:]) or other.startswith(beginnings):
            for token in tokens - {other}:
                inside = any(other.endswith(token[:length]) for length in range(1, len(token)))
                if inside or token in other:
                    covered.add(token)
    return covered
