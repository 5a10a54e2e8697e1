from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tiny_tokenizer import save_tokenizer
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from tritonllm.engine.detokenizer import REPLACEMENT, IncrementalDetokenizer, Words, backend_of, bytes_of, find_stop
from tritonllm.engine.tokenizer import bad_word_ids, load_tokenizer

text = st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters=[REPLACEMENT]), max_size=30)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    return load_tokenizer(str(folder))


@given(prompt=text, output=text)
def test_pieces_add_up_and_hold_whole_characters(tokenizer, prompt, output):
    detokenizer = IncrementalDetokenizer(tokenizer, tokenizer.encode(prompt))
    pieces = [detokenizer.append(token) for token in tokenizer.encode(output)]
    assert "".join(pieces) == detokenizer.text == output
    assert not any(REPLACEMENT in piece for piece in pieces)


def test_a_character_appears_with_its_last_token(tokenizer):
    ids = tokenizer.encode("🦊")
    assert len(ids) == 4
    detokenizer = IncrementalDetokenizer(tokenizer, [])
    assert [detokenizer.append(i) for i in ids] == ["", "", "", "🦊"]


@given(output=text)
def test_bytes_of_tokens_add_up_to_the_text(tokenizer, output):
    found = [bytes_of(tokenizer, token, tokenizer.decode([token])) for token in tokenizer.encode(output)]
    assert b"".join(found) == output.encode()


def test_bytes_of_tokens_that_are_named_by_their_byte():
    names = {1: "<0xF0>", 2: "\u2581\ufffd"}
    tokenizer = SimpleNamespace(convert_ids_to_tokens=names.get)
    assert bytes_of(tokenizer, 1, REPLACEMENT) == b"\xf0"
    assert bytes_of(tokenizer, 2, f" {REPLACEMENT}") == f" {REPLACEMENT}".encode()  # it is this character
    assert bytes_of(tokenizer, 1, "<0xF0>") == b"<0xF0>"
    assert bytes_of(None, 7, "token_id:7") == b"token_id:7"


@pytest.mark.parametrize("cleans", [False, True])
def test_words_are_what_the_tokenizer_says_of_single_tokens(tokenizer, cleans, monkeypatch):
    """Special ones and parts of characters, too."""
    monkeypatch.setattr(tokenizer, "clean_up_tokenization_spaces", cleans)
    monkeypatch.setattr(tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", True)
    words = Words(tokenizer)
    for _ in range(2):
        assert [words(token) for token in range(len(tokenizer))] == [
            tokenizer.decode([t]) for t in range(len(tokenizer))
        ]


def test_words_of_other_tokenizers_are_asked_for_once():
    asked = []

    class Theirs:
        def decode(self, ids):
            asked.append(ids)
            return "w" * ids[0]

    words = Words(Theirs())
    assert [words(token) for token in (2, 1, 2, 0, 0)] == ["ww", "w", "ww", "", ""]
    assert asked == [[2], [1], [0]]
    assert Words(None)(5) is None


def test_half_a_character_at_the_end_is_left_out(tokenizer):
    detokenizer = IncrementalDetokenizer(tokenizer, [])
    for token in tokenizer.encode("ok 🦊")[:-1]:
        detokenizer.append(token)
    assert detokenizer.text == "ok "


def test_bytes_that_are_no_text_do_not_stall_the_output(tokenizer):
    stray = tokenizer.encode("🦊")[1]  # a continuation byte, which cannot begin a character
    detokenizer = IncrementalDetokenizer(tokenizer, [])
    for _ in range(20):
        detokenizer.append(stray)
    for token in tokenizer.encode(" done"):
        detokenizer.append(token)
    assert detokenizer.text.endswith(" done")
    assert len(detokenizer.text) == 20 + len(" done")


def test_special_tokens(tokenizer):
    ids = [*tokenizer.encode("a"), tokenizer.eos_token_id, *tokenizer.encode("b")]
    for skip, expected in ((True, "ab"), (False, "a<|endoftext|>b")):
        detokenizer = IncrementalDetokenizer(tokenizer, [], skip_special_tokens=skip)
        for token in ids:
            detokenizer.append(token)
        assert detokenizer.text == expected


@given(text=st.text("ab", max_size=12), new=st.integers(0, 12), stop=st.lists(st.text("ab", min_size=1, max_size=3)))
def test_find_stop_matches_a_search_for_what_the_new_characters_complete(text, new, stop):
    new = min(new, len(text))
    found = [
        (at, s) for s in stop for at in range(len(text)) if text.startswith(s, at) and at + len(s) > len(text) - new
    ]
    expected = min(found, key=lambda f: (f[0], stop.index(f[1])), default=None)
    assert find_stop(text, new, stop) == expected


def test_bad_words_are_banned_with_and_without_a_space(tokenizer):
    sequences = bad_word_ids(tokenizer, ("cat",))
    assert [tokenizer.decode(list(ids)) for ids in sequences] == ["cat", " cat"]


def test_missing_tokenizer_names_the_way_out(tmp_path):
    with pytest.raises(ValueError, match="skip_tokenizer_init=True"):
        load_tokenizer(str(tmp_path))


def byte_fallback():
    """As Llama 2's tokenizer decodes: bytes are tokens, and the first space is dropped."""
    words = ["▁", "▁the", "the", "▁fox", "a", "▁a", "é", "▁–"]
    vocabulary = {"</s>": 0} | {f"<0x{i:02X}>": i + 1 for i in range(256)}
    vocabulary |= {word: len(vocabulary) + i for i, word in enumerate(words)}
    made = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>")


@pytest.fixture(scope="module", params=["bytes", "byte fallback"])
def kind(request, tokenizer):
    return tokenizer if request.param == "bytes" else byte_fallback()


class SlowTokenizer:
    """The same texts, but no tokenizers library behind it."""

    def __init__(self, tokenizer):
        self.decode = tokenizer.decode


@given(data=st.data(), skip=st.booleans())
def test_the_stream_of_the_library_gives_the_same_pieces(kind, data, skip):
    ids = st.integers(0, len(kind) - 1)
    prompt, output = data.draw(st.lists(ids, max_size=8)), data.draw(st.lists(ids, max_size=40))
    assert backend_of(kind) is not None and backend_of(SlowTokenizer(kind)) is None
    fast = IncrementalDetokenizer(kind, prompt, skip_special_tokens=skip)
    slow = IncrementalDetokenizer(SlowTokenizer(kind), prompt, skip_special_tokens=skip)
    assert [fast.append(token) for token in output] == [slow.append(token) for token in output]
