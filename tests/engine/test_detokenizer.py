from types import SimpleNamespace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.random_tokenizers import OTHERS, WORDS, ByteFallback, ByteLevel, SlowTokenizer, with_words
from support.tiny_tokenizer import save_tokenizer

from tritonllm.engine.text.detokenizer import (
    REPLACEMENT,
    IncrementalDetokenizer,
    TokenTexts,
    backend_of,
    bytes_of,
    find_stop,
)
from tritonllm.engine.text.tokenizer import bad_word_ids, load_tokenizer

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
    names = {1: "<0xF0>", 2: "\u2581\ufffd", 3: b"\xf0'"}
    tokenizer = SimpleNamespace(convert_ids_to_tokens=names.get)
    assert bytes_of(tokenizer, 1, REPLACEMENT) == b"\xf0"
    assert bytes_of(tokenizer, 2, f" {REPLACEMENT}") == f" {REPLACEMENT}".encode()  # it is this character
    assert bytes_of(tokenizer, 3, f"{REPLACEMENT}'") == b"\xf0'"  # tiktoken's names are bytes
    assert bytes_of(tokenizer, 1, "<0xF0>") == b"<0xF0>"
    assert bytes_of(None, 7, "token_id:7") == b"token_id:7"


@pytest.mark.parametrize("slow", [False, True])
def test_words_are_what_single_tokens_say_within_a_text(tokenizer, slow):
    """Special ones and parts of characters, too."""
    words = TokenTexts(SlowTokenizer(tokenizer) if slow else tokenizer)
    for _ in range(2):
        assert [words(token) for token in range(len(tokenizer))] == [
            tokenizer.decode([t]) for t in range(len(tokenizer))
        ]


@pytest.mark.parametrize(
    "name", [name for name in OTHERS if name != "suffixes"]
)  # which have a space only before others
def test_words_have_the_spaces_that_a_text_has(name):
    tokenizer = with_words(name)
    words, a = TokenTexts(tokenizer), tokenizer.convert_tokens_to_ids("a")
    for token in tokenizer.convert_tokens_to_ids(WORDS):
        assert words(token) == tokenizer.decode([a, token])[1:]


def test_words_of_other_tokenizers_are_asked_for_once():
    asked = []

    class Theirs:
        def decode(self, ids, **options):
            asked.append(ids)
            return "w" * sum(ids)

    words = TokenTexts(Theirs())
    assert [words(token) for token in (2, 1, 2, 0, 0)] == ["ww", "w", "ww", "", ""]
    assert asked == [[2], [2, 2], [1], [1, 1], [0], [0, 0]]
    assert TokenTexts(None)(5) is None


def test_half_a_character_waits_for_the_end(tokenizer):
    detokenizer = IncrementalDetokenizer(tokenizer, [])
    for token in tokenizer.encode("ok 🦊")[:-1]:
        detokenizer.append(token)
    assert detokenizer.text == "ok "
    assert (detokenizer.finish(), detokenizer.finish()) == (REPLACEMENT, "")
    assert detokenizer.text == f"ok {REPLACEMENT}"


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


def follow(kind, prompt, output, *, slow=False, skip=True):
    """The texts that come with the tokens of these pieces, and at the end."""
    tokenizer, ids = kind.tokenizer([*prompt, *output])
    tokenizer = SlowTokenizer(tokenizer) if slow else tokenizer
    detokenizer = IncrementalDetokenizer(tokenizer, ids[: len(prompt)], skip_special_tokens=skip)
    texts = [detokenizer.append(token) for token in ids[len(prompt) :]]
    texts.append(detokenizer.finish())
    assert "".join(texts) == detokenizer.text
    return texts


def each(text):
    return [bytes([byte]) for byte in text.encode()]


slow = pytest.mark.parametrize("slow", [False, True])


@slow
def test_a_prompt_that_ends_in_a_run_of_bytes(slow):
    for prompt in (each("漢字"), ["a", *each("漢字")], each("漢字" * 20)):
        found = follow(ByteFallback(), prompt, [*each("日本語"), " the"], slow=slow)
        assert found == ["", "", "日", "", "", "本", "", "", "語", " the", ""]


@slow
def test_tokens_that_each_end_inside_of_a_character(slow):
    """No part of the text waits for more than a character's other bytes."""
    text = "नमस्तेदुनिया"
    data = text.encode()
    pieces = [data[:1], *(data[i : i + 3] for i in range(1, len(data), 3))]
    assert len(pieces) > 8
    for prompt in ([], pieces):
        found = follow(ByteLevel(), prompt, pieces if not prompt else [data[:1], *pieces[1:]], slow=slow)
        assert found == ["", *text, ""]


@slow
@pytest.mark.parametrize("kind", [ByteLevel(), ByteFallback()])
def test_a_prompt_that_ends_inside_of_a_character(kind, slow):
    """The character is the output's, if it becomes one, and else the prompt's."""
    a = b"a" if isinstance(kind, ByteLevel) else "a"
    for before in ([], [a], each("漢")):
        assert follow(kind, [*before, *each("🦊")[:2]], [*each("🦊")[2:], a], slow=slow) == ["", "🦊", "a", ""]
        assert follow(kind, [*before, *each("🦊")[:2]], [a, a], slow=slow) == ["a", "a", ""]
        assert follow(kind, [*before, *each("🦊")[:2]], [None], slow=slow) == ["", ""]
        apart = [*before, *each("🦊")[:1], None, *each("🦊")[1:3]]
        assert follow(kind, apart, each("🦊")[3:], slow=slow) == ["🦊", ""]


def test_a_run_of_bytes_that_is_no_text():
    """Characters that are out stay; decode makes U+FFFD of them, too."""
    found = follow(ByteFallback(), ["a"], [*each("漢"), b"\xff", *each("字"), " a"])
    assert "".join(found) == f"漢{REPLACEMENT * 4} a"
    assert "".join(follow(ByteFallback(), ["a"], [*each("漢\ufffd漢"), " a"])) == "漢\ufffd漢 a"
    assert "".join(follow(ByteFallback(), [], [*each("\ufffd"), " \ufffd", " a"])) == "\ufffd \ufffd a"


@slow
@pytest.mark.parametrize("kind", [ByteLevel(), ByteFallback()])
def test_a_hundred_bytes_that_are_no_text(kind, slow):
    """They are not all decoded again for each."""
    asked, (tokenizer, ids) = [], kind.tokenizer([b"\xff", *100 * [b"\x80"], *each("é")])
    other = SlowTokenizer(tokenizer)
    other.decode = lambda ids, **options: asked.append(len(ids)) or tokenizer.decode(ids, **options)
    detokenizer = IncrementalDetokenizer(other if slow else tokenizer, [])
    for token in ids:
        detokenizer.append(token)
    detokenizer.finish()
    assert detokenizer.text == tokenizer.decode(ids) and max(asked, default=0) <= 16


def test_special_tokens_that_are_skipped_are_nowhere():
    """Within a character, at the beginning, and as a prompt, behind which the first space is dropped."""
    assert follow(ByteFallback(), [None] * 9, [None, " a", " a"]) == ["", "a", " a", ""]
    assert follow(ByteFallback(), [" a", *[None] * 30], [" a"]) == [" a", ""]
    assert "".join(follow(ByteFallback(), ["a"], [b"\xc3", *3 * [None], b"\xa9"])) == "é"
    assert "".join(follow(ByteFallback(), ["a"], [b"\xc3", None, b"\xa9"], skip=False)) == "\ufffd</s>\ufffd"


@settings(max_examples=examples(60))
@given(data=st.data(), slow=st.booleans(), skip=st.booleans())
@pytest.mark.parametrize("kind", [ByteLevel(), ByteFallback()])
def test_the_text_is_what_decode_adds_to_that_of_the_prompt(kind, data, slow, skip):
    """All the time but for U+FFFD at its end, which may become a character."""
    pieces = kind.pieces(data.draw)
    cut = data.draw(st.integers(0, len(pieces)))
    shown = [kind.special if piece is None and not skip else piece for piece in pieces]
    whole, prompt = kind.text(shown[:cut], whole=True), kind.text(shown[:cut])
    if isinstance(kind, ByteFallback):
        assume(REPLACEMENT not in whole[-20:])  # where a run begins that is no text is not looked for
    else:
        tokenizer, ids = kind.tokenizer(pieces)
        assert kind.text(shown) == tokenizer.decode(ids, skip_special_tokens=skip)
    found = follow(kind, pieces[:cut], pieces[cut:], slow=slow, skip=skip)
    for end in range(cut + 1, len(pieces) + 1):
        expected, text = kind.text(shown[:end])[len(whole) :], "".join(found[: end - cut])
        for _ in prompt[len(whole) :]:  # what is still U+FFFD is the prompt's
            expected = expected.removeprefix(REPLACEMENT)
        assert expected.startswith(text) and expected[len(text) :].removeprefix(" ") in 4 * REPLACEMENT
        assert end < len(pieces) or text + found[-1] == expected


@settings(max_examples=examples(30))
@given(data=st.data(), slow=st.booleans(), skip=st.booleans())
@pytest.mark.parametrize("name", OTHERS)
def test_texts_of_other_decoders(name, data, slow, skip):
    tokenizer = with_words(name)
    words = st.lists(st.sampled_from(WORDS), max_size=9).map(tokenizer.convert_tokens_to_ids)
    prompt, output = data.draw(words), data.draw(words)
    options = {"skip_special_tokens": skip}
    detokenizer = IncrementalDetokenizer(SlowTokenizer(tokenizer) if slow else tokenizer, prompt, **options)
    before = tokenizer.decode(prompt, **options)
    for i, token in enumerate(output):
        detokenizer.append(token)
        assert before + detokenizer.text == tokenizer.decode(prompt + output[: i + 1], **options)
    assert detokenizer.finish() == ""


def test_what_the_library_is_asked_for():
    assert backend_of(with_words("none")) is not None and backend_of(SlowTokenizer(with_words("none"))) is None
