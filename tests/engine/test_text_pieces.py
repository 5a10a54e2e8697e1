"""Texts that are tokenized in pieces have the tokens that they have as a whole."""

import copy
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tritonllm.demo import model_path
from tritonllm.engine.text_pieces import PieceStore, TextPieces

BEGIN, END = "<|im_start|>", "<|im_end|>"
LETTERS = ["a", "b", "ab", "Ab", "\u2581", "\u2581a", "\u2581ab", "Ġ", "Ġa", "Ġab", "##b", "<", "|", "im", ">"]


def made(model="bpe", *, normalizer=None, pre_tokenizer=None, processor=False, tokens=(BEGIN, END), template=None):
    """A small tokenizer of one of the kinds there are."""
    vocab = {token: i for i, token in enumerate(["[UNK]", "<s>", "</s>", *LETTERS])}
    if model == "bpe":
        merges = [("a", "b"), ("\u2581", "a"), ("\u2581", "ab"), ("Ġ", "a"), ("Ġ", "ab")]
        made = Tokenizer(models.BPE(vocab, merges, unk_token="[UNK]", fuse_unk=True))
    elif model == "unigram":
        made = Tokenizer(models.Unigram([(token, -float(i)) for token, i in vocab.items()], unk_id=0))
    else:
        made = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer, made.decoder = normalizer, pre_tokenizer, decoders.Fuse()
    made.add_special_tokens([AddedToken(t, normalized=False) if isinstance(t, str) else t for t in tokens])
    if processor:
        made.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    names = [str(token) for token in tokens]
    return PreTrainedTokenizerFast(
        tokenizer_object=made, additional_special_tokens=names if template is None else None, chat_template=template
    )


def metaspace(scheme):
    return made("unigram", pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme=scheme))


LLAMA_2 = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
BERT = {"normalizer": normalizers.BertNormalizer(), "pre_tokenizer": pre_tokenizers.BertPreTokenizer()}
KINDS = {
    "demo": lambda: AutoTokenizer.from_pretrained(str(model_path())),
    "bytes": lambda: made(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "bytes behind a space": lambda: made(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "metaspace always": lambda: metaspace("always"),
    "metaspace first": lambda: metaspace("first"),
    "metaspace never": lambda: metaspace("never"),
    "llama 2": lambda: made(normalizer=LLAMA_2, processor=True),
    "words": lambda: made("words", **BERT, processor=True),
    "takes spaces": lambda: made(tokens=(BEGIN, AddedToken(END, normalized=False, lstrip=True, rstrip=True))),
    "one word": lambda: made(tokens=(BEGIN, AddedToken("im", normalized=False, single_word=True))),
    "one inside of another": lambda: made(tokens=(BEGIN, END, f"{BEGIN}ab", "b<|im", f"a{END}")),
    "normalized": lambda: made(normalizer=normalizers.Lowercase(), tokens=(BEGIN, AddedToken("AB", normalized=True))),
}
PARTS = [BEGIN, END, "im", "AB", "ab", "a", " ", "  ", "\n", "<|im", "<|im_start", "|>", "b", "\u00e9", "A", "b<|im"]
TEXTS = st.lists(st.sampled_from(PARTS), max_size=14).map("".join)


@pytest.fixture(scope="module", params=[*KINDS])
def both(request):
    tokenizer = KINDS[request.param]()
    return TextPieces(tokenizer), tokenizer


def test_all_these_kinds_work(both):
    """Some treat the beginning of a text in another way, but that lies in the first piece."""
    assert both[0].works


@settings(max_examples=200, deadline=None)
@given(st.lists(TEXTS, min_size=1, max_size=4), st.booleans())
def test_the_tokens_are_those_of_the_whole(both, texts, special):
    """Of texts that begin as earlier ones did, too."""
    pieces, tokenizer = both
    for end in range(len(texts)):
        text = "".join(texts[: end + 1])
        assert pieces.encode(text, special) == tokenizer.encode(text, add_special_tokens=special)


class Noting:
    """A tokenizer that notes what it reads."""

    def __init__(self, tokenizer):
        self._tokenizer, self.read = tokenizer, []

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def __deepcopy__(self, memo):
        return Noting(copy.deepcopy(self._tokenizer))

    def encode(self, text, **options):
        self.read.append(text)
        return self._tokenizer.encode(text, **options)

    def __call__(self, texts, **options):
        self.read += texts
        return self._tokenizer(texts, **options)


@pytest.fixture
def noting():
    found = Noting(KINDS["demo"]())
    pieces = TextPieces(found)
    found.read.clear()
    return pieces, found


def turn(who, text):
    return f"{BEGIN}{who}\n{text}{END}\n"


def test_only_what_is_new_is_read(noting):
    pieces, tokenizer = noting
    chat = "You are a dog.\n" + turn("user", "hello") + turn("assistant", "woof") + turn("user", "hello")
    pieces.encode(chat)
    told = f"{BEGIN}user\nhello", f"{BEGIN}assistant\nwoof"
    assert tokenizer.read == ["You are a dog.\n", told[0], f"{END}\n", told[1]]  # equal ones once
    tokenizer.read.clear()
    pieces.encode(chat)
    assert not tokenizer.read
    pieces.encode(chat + turn("assistant", "what?"))
    assert tokenizer.read == [f"{BEGIN}assistant\nwhat?"]


def test_texts_of_one_piece_are_not_kept(noting):
    pieces, tokenizer = noting
    for text in ("the little dog", BEGIN + "the little dog", ""):
        tokenizer.read.clear()
        assert pieces.encode(text) == pieces.encode(text)
        assert tokenizer.read == [text, text]


def test_a_copy_knows_the_same_pieces(noting):
    pieces, tokenizer = noting
    text = turn("user", "hello") + turn("assistant", "woof")
    ids = pieces.encode(text)
    other = copy.deepcopy(tokenizer)
    copied = pieces.copied(other)
    other.read.clear()
    assert copied.encode(text) == ids and not other.read


def test_what_was_used_last_is_kept():
    store = PieceStore(100)
    for name in "abcd":
        store.keep(name * 25, name)
    assert store.find(["a" * 25, "x"]) == ["a", None]
    store.keep("e" * 25, "e")
    store.keep("e" * 25, "again")
    store.keep("f" * 26, "too long")
    wanted = ["a" * 25, "b" * 25, "c" * 25, "d" * 25, "e" * 25, "f" * 26]
    assert store.find(wanted) == ["a", None, "c", "d", "again", None]


def test_threads_share_a_store():
    store, ends = PieceStore(300), []

    def work(name):
        for i in range(3000):
            text = f"{i % 7}{name}" * 10
            store.keep(text, text)
            if store.find([text, "?"])[0] not in (text, None):
                return
        ends.append(name)

    threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(ends) == [*"abcd"]
    assert sum(map(len, store._tokens)) == store._characters <= 300


def test_a_tokenizer_that_cannot_say_what_it_cuts_at(noting):
    _, tokenizer = noting
    tokenizer.is_fast = False
    assert not TextPieces(tokenizer).works
    tokenizer.is_fast, tokenizer.split_special_tokens = True, True
    assert not TextPieces(tokenizer).works
    assert TextPieces(tokenizer).encode(turn("user", "hello")) == tokenizer.encode(turn("user", "hello"))


def test_a_tokenizer_whose_pieces_have_other_tokens(noting):
    class Counting(Noting):
        def encode(self, text, **options):
            return [*super().encode(text, **options), 1000 + len(text)]

    tokenizer = Counting(noting[1])
    pieces = TextPieces(tokenizer)
    assert not pieces.works
    assert pieces.encode(turn("user", "hello"))[-1] == 1000 + len(turn("user", "hello"))


def test_a_tokenizer_that_fails_on_what_is_tried():
    words = Tokenizer(models.WordLevel({"hello": 0, "<s>": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.add_special_tokens([AddedToken("<s>", normalized=False)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>")
    pieces = TextPieces(tokenizer)
    assert not pieces.works
    assert pieces.encode("<s>hello<s>hello") == [1, 0, 1, 0]


def test_only_tokens_of_chats_are_cut_at():
    """A tokenizer may have thousands that are used by nobody."""
    unused = [f"<unused{i}>" for i in range(500)]
    tokenizer = made(tokens=(*unused, BEGIN, END), template="{{ '" + BEGIN + "' }}")
    assert TextPieces(tokenizer)._cut.pattern == "<\\|im_start\\|>"
