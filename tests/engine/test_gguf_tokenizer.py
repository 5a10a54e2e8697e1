"""The tokenizer of a GGUF file, beside the ones that it was made from."""

import json
from itertools import pairwise
from pathlib import Path

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.engines import tiny_checkpoint
from support.gguf_files import add_byte_level, close

from tritonllm.engine.text.gguf_tokenizer import SPLITS
from tritonllm.engine.text.tokenizer import load_tokenizer

CONVERSATION = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}]
LETTERS = "abct h"
# Sentencepiece numbers pieces by their scores: an earlier one is merged first.
PIECES = ["▁t", "he", "ca", "▁the", "cat", "▁ca", "▁cat", "ab", "bc", "▁▁", "tt"]


def byte_level(path: Path, pre: str = "gpt-2") -> None:
    writer = gguf.GGUFWriter(path, "qwen3")
    add_byte_level(writer, json.loads((tiny_checkpoint() / "tokenizer.json").read_text()), pre)
    close(writer)


def sentencepiece(path: Path, *, prefix: bool | None = None, bos: bool | None = None, eos: bool = False) -> list[str]:
    """A file with letters, bytes, pieces and two tokens that a user defined; its tokens."""
    special = ["<unk>", "<s>", "</s>"]
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES, "▁", *"abcthe", "<tool>", "  "]
    kinds = [2, 3, 3, *[6] * 256, *[1] * (len(PIECES) + 7), 4, 4]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list([token for token in tokens if token != "▁▁"])
    writer.add_token_scores([-float(i) for i in range(len(tokens) - 1)])
    writer.add_token_types([kind for token, kind in zip(tokens, kinds, strict=True) if token != "▁▁"])
    for token, index in (("unk", 0), ("bos", 1), ("eos", 2)):
        getattr(writer, f"add_{token}_token_id")(index)
    if prefix is not None:
        writer.add_add_space_prefix(prefix)
    if bos is not None:
        writer.add_add_bos_token(bos)
    writer.add_add_eos_token(eos)
    close(writer)
    return ["▁▁" if token == "  " else token for token in tokens if token != "▁▁"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """The tokenizer of a folder, and that of a file with the same."""
    file = tmp_path_factory.mktemp("gguf") / "model.gguf"
    byte_level(file)
    return load_tokenizer(str(tiny_checkpoint())), load_tokenizer(str(file))


@given(text=st.text() | st.sampled_from(["the cat<|im_end|>\n", "  the\t\tdog 123's", "<|endoftext|>"]))
def test_byte_level_is_that_of_tokenizer_json(pair, text):
    theirs, ours = pair
    ids = theirs(text).input_ids
    assert ours(text).input_ids == ids
    for skip in (True, False):
        assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


def test_what_comes_with_the_tokens(pair):
    theirs, ours = pair
    assert (ours.eos_token_id, ours.pad_token_id, ours.bos_token_id) == (theirs.eos_token_id, theirs.pad_token_id, None)
    assert len(ours) == len(theirs)
    for more in (True, False):
        want = theirs.apply_chat_template(CONVERSATION, tokenize=False, add_generation_prompt=more)
        assert ours.apply_chat_template(CONVERSATION, tokenize=False, add_generation_prompt=more) == want


@pytest.mark.parametrize(
    ("pre", "parts"),
    [
        ("gpt-2", ["DON", "'", "T", " 12345", " naïveGröße", " (", "x", ")", "\n", "\n", "y"]),
        ("smollm", ["DON", "'", "T", " ", *"12345", " naïveGröße", " (", "x", ")", "\n", "\n", "y"]),
        ("llama-bpe", ["DON", "'T", " ", "123", "45", " naïveGröße", " (", "x", ")\n\n", "y"]),
        ("qwen2", ["DON", "'T", " ", *"12345", " naïveGröße", " (", "x", ")\n\n", "y"]),
        ("gpt-4o", ["DON'T", " ", "123", "45", " naïve", "Größe", " (", "x", ")\n\n", "y"]),
        ("tekken", ["DON", "'T", " ", *"12345", " naïve", "Größe", " (", "x", ")\n\n", "y"]),
    ],
)
def test_where_a_text_is_split(tmp_path, pre, parts):
    """Small numbers, shortened words, capitals: where the rules differ."""
    byte_level(tmp_path / "model.gguf", pre)
    backend = load_tokenizer(str(tmp_path / "model.gguf")).backend_tokenizer
    text = "DON'T 12345 naïveGröße (x)\n\ny"
    found = [text[begin:end] for _, (begin, end) in backend.pre_tokenizer.pre_tokenize_str(text)]
    assert "".join(parts) == text
    assert found == parts


def test_characters_are_composed_where_the_rule_says_so(tmp_path):
    ids = {}
    for pre in ("qwen2", "gpt-2"):
        byte_level(tmp_path / "model.gguf", pre)
        tokenizer = load_tokenizer(str(tmp_path / "model.gguf"))
        ids[pre] = [tokenizer(text).input_ids for text in ("e\u0301", "é")]
    assert ids["qwen2"][0] == ids["qwen2"][1] and ids["gpt-2"][0] != ids["gpt-2"][1]


def test_all_rules_make_a_tokenizer(tmp_path):
    for pre in SPLITS:
        byte_level(tmp_path / "model.gguf", pre)
        tokenizer = load_tokenizer(str(tmp_path / "model.gguf"))
        assert tokenizer.decode(tokenizer("the Cat's 12\n").input_ids) == "the Cat's 12\n"


def merged(text: str, tokens: list[str]) -> list[int]:
    """Sentencepiece's BPE by its definition: of neighbours that make a piece, the one of the best score first."""
    ranks = {token: i for i, token in enumerate(tokens)}
    parts = list(text.replace(" ", "▁"))
    while True:
        found = [(ranks[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]
        if not found:
            break
        _, i = min(found)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    bytes_of = [[part] if part in ranks else [f"<0x{byte:02X}>" for byte in part.encode()] for part in parts]
    return [ranks[token] for of in bytes_of for token in of]


@pytest.fixture(scope="module", params=[None, False])
def pieces(request, tmp_path_factory):
    file = tmp_path_factory.mktemp("gguf") / "model.gguf"
    tokens = sentencepiece(file, prefix=request.param)
    return load_tokenizer(str(file)), tokens, "" if request.param is False else " "


@given(text=st.text(st.sampled_from(LETTERS + "é\n"), min_size=1))
def test_sentencepiece_is_what_its_definition_says(pieces, text):
    tokenizer, tokens, prefix = pieces
    assert tokenizer(text).input_ids == [1, *merged(prefix + text, tokens)]
    assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text


def test_tokens_that_users_defined(pieces):
    tokenizer, tokens, _ = pieces
    ids = tokenizer("a<tool>a</s>").input_ids
    assert tokens.index("<tool>") in ids and 2 in ids
    assert tokenizer.decode(ids, skip_special_tokens=True).replace(" ", "") == "a<tool>a"
    assert tokens.index("▁▁") in tokenizer("a  a").input_ids


@pytest.mark.parametrize(("bos", "eos", "around"), [(None, False, (1,)), (False, False, ()), (True, True, (1, 2))])
def test_tokens_around_a_text(tmp_path, bos, eos, around):
    tokens = sentencepiece(tmp_path / "model.gguf", bos=bos, eos=eos)
    tokenizer = load_tokenizer(str(tmp_path / "model.gguf"))
    inner = merged(" a", tokens)
    assert tokenizer("a").input_ids == [*around[:1], *inner, *around[1:]]
    assert tokenizer("a", add_special_tokens=False).input_ids == inner


@pytest.mark.parametrize(
    ("model", "pre", "tokens", "message"),
    [
        ("gpt2", "mystery", ["a"], r"splits texts by the rule 'mystery'; known: gpt-2, smollm, "),
        ("bert", "", ["a"], r"has a tokenizer of the kind 'bert'; known: gpt2, llama"),
        ("gpt2", "gpt-2", [], r"has no tokens"),
        ("gpt2", "gpt-2", ["a"], r".*[Tt]oken .* out of vocabulary"),
    ],
)
def test_a_tokenizer_that_is_not_known(tmp_path, model, pre, tokens, message):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    if tokens:
        writer.add_token_list(tokens)
        writer.add_token_merges(["a b"])
    close(writer)
    with pytest.raises(ValueError, match=rf"tokenizer: .*model\.gguf.*{message}.*Pass tokenizer= with a folder"):
        load_tokenizer(str(tmp_path / "model.gguf"))
