"""Texts that are tokenized in pieces have the tokens that they have as a whole."""

import copy
import threading
import tracemalloc
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tritonllm.demo import model_path
from tritonllm.engine.data.request import PACKED
from tritonllm.engine.text.text_pieces import MANY, TOGETHER, PieceStore, TextPieces, _size

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


def test_which_kinds_work(both, request):
    """Some treat the beginning of a text in another way, but that lies in the first piece. What is found between words
    is found at the ends of pieces, too."""
    assert both[0].works == (request.node.callspec.params["both"] != "one word")


@settings(max_examples=examples(200), deadline=None)
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

    def __len__(self):
        return len(self._tokenizer)

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


def test_what_is_not_to_be_kept(noting):
    pieces, tokenizer = noting
    text = turn("user", "hello") * 2
    for _ in range(2):
        pieces.encode(text, keep=False)
    assert tokenizer.read == [f"{BEGIN}user\nhello", f"{END}\n"] * 2


def test_many_short_pieces_are_read_as_one_text(noting):
    pieces, tokenizer = noting
    text = "".join(BEGIN + f"{i}" for i in range(MANY + 1))
    pieces.encode(text)
    assert tokenizer.read == [text]
    tokenizer.read.clear()
    pieces.encode(text[: text.rindex(BEGIN)])
    assert len(tokenizer.read) == MANY


def test_a_tokenizer_that_is_changed_is_tried_again():
    tokenizer = KINDS["demo"]()
    pieces = TextPieces(tokenizer)
    text = turn("user", "hello dog") * 2
    before = pieces.encode(text)
    tokenizer.add_tokens(["dog"])
    assert before != pieces.encode(text) == tokenizer.encode(text)
    tokenizer.split_special_tokens = True
    assert pieces.encode(text) == tokenizer.encode(text)


def test_long_pieces_are_read_together(noting):
    pieces, tokenizer = noting
    text = "".join(turn("user", f"{i} " + "hello dog " * 400) for i in range(6))
    assert pieces.encode(text) == KINDS["demo"]().encode(text)
    assert len(tokenizer.read) == 7 and sum(map(len, tokenizer.read)) > TOGETHER
    assert pieces.encode(text + "x") == KINDS["demo"]().encode(text + "x")


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
    ids = array(PACKED, [1, 2])
    store = PieceStore(4 * _size("a", ids))
    for name in "abcd":
        store.keep(name, ids)
    assert store.find(["a", "x"]) == [ids, None]
    store.keep("e", ids)
    store.keep("ff", ids)  # more than a quarter
    assert [found is not None for found in store.find([*"abcde", "ff"])] == [True, False, True, True, True, False]


def test_what_is_kept_has_its_memory():
    """Short pieces, too, and those of characters of four bytes, of many tokens each."""
    store = PieceStore(1 << 20)
    tracemalloc.start()
    for i in range(9000):
        store.keep(f"{BEGIN}{i}", array(PACKED, [5, i]))
        store.keep(f"{i}" + "\U0001f600" * 20, array(PACKED, range(80)))
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0.6 * 2**20 < taken < 1.3 * 2**20


def test_threads_share_a_store():
    store, ends = PieceStore(3000), []

    def work(name):
        for i in range(3000):
            text, ids = f"{i % 7}{name}" * 10, array(PACKED, [i % 7])
            store.keep(text, ids)
            if store.find([text, "?"])[0] not in (ids, None):
                return
        ends.append(name)

    threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(ends) == [*"abcd"]
    assert sum(_size(*entry) for entry in store._tokens.items()) == store._bytes <= 3000


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


@pytest.mark.parametrize("cut", [BEGIN, END, "<|endoftext|>"])
def test_every_cut_is_tried(noting, cut):
    """Some classes do something of their own where one of their tokens stands (CodeLlama's, at `<FILL_ME>`)."""

    class Filling(Noting):
        def encode(self, text, **options):
            ids = super().encode(text, **options)
            return [9, *ids] if cut in text and not text.startswith(cut) else ids

    assert not TextPieces(Filling(noting[1])).works


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
