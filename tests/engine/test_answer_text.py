"""Where stop strings count in the output of a model that thinks, against what the server reads out of such outputs."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.random_tokenizers import ByteFallback

from tritonllm import LLM, SamplingParams, StructuredOutputsParams
from tritonllm.config.sampling_params import RequestOutputKind
from tritonllm.config.thought_format import ThoughtFormat
from tritonllm.demo import model_path
from tritonllm.engine.data.request import Request, RequestStatus
from tritonllm.engine.text.answer_text import ENDS, Channels, Tagged, ThoughtMarks
from tritonllm.engine.text.output_processor import SequenceOutput
from tritonllm.serve.parsing.choose import Formats
from tritonllm.serve.parsing.pieces import Arguments, Content

TAGS = ["<think>", "</think>", "<thi", "</thi", "nk>", "<", "a", "b ", " ", "\n", "é"]
MARKS = [
    "<|channel|>",
    "<|message|>",
    *ENDS,
    "analysis",
    "final",
    "commentary",
    " to=functions.f",
    "<|",
    "a",
    " ",
    "\n",
]


def cut(text, places):
    ends = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[begin:end] for begin, end in pairwise(ends)]


def followed(answer, parts, tokens=()):
    """The parts of the answer, and what was shown as decided at each step."""
    text, found, decided = "", [], []
    for number, part in enumerate(parts):
        text += part
        token = tokens[number] if number < len(tokens) else 7
        found += answer.take(text, token, number == len(parts) - 1)
        decided.append(answer.decided)
    return text, found, decided


def joined(text, found):
    """The answer's text: what was new each time; each part goes on where the one before has ended, or is another."""
    for one, other in pairwise(found):
        assert other.new >= one.end and other.begin >= one.begin
        assert other.new == (one.end if other.begin == one.begin else other.begin)
    return "".join(text[part.new : part.end] for part in found)


def read(formats, text, prompt=""):
    """What the server says to the user of the text, calls among it."""
    reader = formats.reader(prompt, [])
    pieces = reader.feed(text) + reader.finish()
    return "".join(piece.text for piece in pieces if isinstance(piece, Content | Arguments))


@settings(max_examples=examples(400), deadline=None)
@given(
    st.lists(st.sampled_from(TAGS), max_size=12).map("".join), st.lists(st.integers(0, 99), max_size=9), st.booleans()
)
def test_the_answer_behind_tags_is_what_the_server_reads(text, places, inside):
    prompt = "x<think>" if inside else "x"
    whole, found, decided = followed(Tagged("<think>", "</think>", None, inside), cut(text, places))
    expected = read(Formats(None, "qwen3"), text, prompt)
    said = joined(whole, found)
    assert said == expected or (said.rstrip() == expected.rstrip()), "blanks at the end of a thought are nobody's"
    assert decided == sorted(decided)


@settings(max_examples=examples(400), deadline=None)
@given(st.lists(st.sampled_from(MARKS), max_size=14).map("".join), st.lists(st.integers(0, 99), max_size=9))
def test_the_answer_in_channels_is_what_the_server_reads(text, places):
    whole, found, decided = followed(Channels(), cut(text, places))
    assert joined(whole, found) == read(Formats(None, "openai_gptoss"), text)
    assert decided == sorted(decided)


def test_tokens_count_where_the_text_does_not_show_them():
    _, found, _ = followed(Tagged("[T]", "[/T]", (1, 2), False), ["", "a.", "", " b"], [1, 7, 2, 7])
    assert found == [(3, 3, 4)]
    _, found, _ = followed(Tagged("[T]", "[/T]", (1, 2), True), ["", "b"], [2, 7])
    assert found == [(0, 0, 1)]
    _, found, _ = followed(Tagged("[T]", "[/T]", (1, 2), False), ["a", "b"], [7, 1])
    assert [part.begin for part in found] == [0, 0]


def decode(tokens):
    return "".join({1: "<think>", 3: "<tag>"}.get(token, "x") for token in tokens)


@pytest.mark.parametrize(
    ("form", "prompt", "vocabulary", "text", "expected"),
    [
        ({}, [5, 1], {"<think>": 1, "</think>": 2}, "a</think>b", "b"),
        ({}, [1, 2], {"<think>": 1, "</think>": 2}, "a</think>b", "a</think>b"),
        ({}, [5, 1], {}, "a</think>b", "b"),
        ({}, [5], {}, "<think>a</think>b", "b"),
        ({"inside": False}, [5, 1], {}, "a", "a"),
        ({"begin": "<tag>", "end": "</tag>"}, [3], {"<think>": 1, "</think>": 2}, "a</tag>b", "b"),
        ({}, [5], {"[THINK]": 1, "[/THINK]": 2}, "[THINK]a[/THINK]b", "b"),
        ({}, [5], {"<|channel|>": 1}, "<|channel|>analysis<|message|>a<|end|><|channel|>final<|message|>b", "b"),
        ({"kind": "channels"}, [5], {}, "<|channel|>final<|message|>b", "b"),
        ({"kind": "tags"}, [5], {"<|channel|>": 1}, "<think>a</think>b", "b"),
    ],
)
def test_the_format_goes_by_the_tokenizer_and_the_prompt(form, prompt, vocabulary, text, expected):
    answer = ThoughtMarks(vocabulary).follow(ThoughtFormat(**form), prompt, decode)
    assert joined(*followed(answer, [text])[:2]) == expected


@pytest.mark.parametrize(
    ("form", "why"),
    [
        ({"kind": "x"}, "kind must be"),
        ({"begin": "<a>"}, "give both tags"),
        ({"begin": " ", "end": "x"}, "begin must be a tag"),
        ({"inside": 1}, "inside must be"),
        ({"odd": 1}, "stop_after_thought: "),
        (3, "stop_after_thought must be"),
    ],
)
def test_a_bad_format_is_refused(form, why):
    with pytest.raises(ValueError, match=why):
        SamplingParams(stop="x", stop_after_thought=form)


def test_the_short_forms():
    assert SamplingParams(stop_after_thought=True).stop_after_thought == ThoughtFormat()
    assert SamplingParams(stop_after_thought=False) == SamplingParams()
    assert SamplingParams(stop_after_thought={"inside": True}).stop_after_thought == ThoughtFormat(inside=True)
    assert SamplingParams(stop_after_thought=ThoughtFormat()).checked().stop_after_thought == ThoughtFormat()


@settings(max_examples=examples(400), deadline=None)
@given(
    words=st.lists(st.sampled_from(TAGS), max_size=12) | st.lists(st.sampled_from(MARKS), max_size=14),
    stop=st.sampled_from(["a", "b ", "<", "<t", "\n", "n", "final", "é"]),
    form=st.sampled_from(["tags", "inside", "channels"]),
    keep=st.booleans(),
    by_end=st.booleans(),
)
def test_an_output_ends_where_its_answer_has_the_stop_string(words, stop, form, keep, by_end):
    """Word by word, as tokens; what is shown meanwhile is never taken back."""
    formats = Formats(None, "openai_gptoss" if form == "channels" else "qwen3")
    prompt = "x<think>" if form == "inside" else "x"
    tokenizer, ids = ByteFallback().tokenizer(["x", *words, "end"])
    params = SamplingParams(stop=stop, include_stop_str_in_output=keep)
    request = Request("a", ids[:1], params, max_total_tokens=99)
    answer = ThoughtMarks({}).follow(formats.thought(prompt, []), [], tokenizer.decode)
    sequence = SequenceOutput(0, request, tokenizer, answer=answer)
    shown, found = "", None
    ending = RequestStatus.FINISHED_STOPPED if by_end else RequestStatus.FINISHED_LENGTH
    tokens = [*ids[1:-1], ids[-1]] if by_end and not keep else ids[1:-1]
    for number, token in enumerate(tokens):
        request.output_token_ids.append(token)
        request.status = ending if number == len(tokens) - 1 else RequestStatus.RUNNING
        found = sequence.extend([token], None, 0)
        if found is not None:
            request.status = RequestStatus.FINISHED_STOPPED
        shown += sequence.output(RequestOutputKind.DELTA).text
        if found is not None:
            break
    whole = read(formats, "".join(words), prompt)
    at = whole.find(stop)
    assert (found is not None) == (at >= 0)
    assert sequence.output(RequestOutputKind.CUMULATIVE).text == shown
    expected = whole if at < 0 else whole[: at + keep * len(stop)]
    assert read(formats, shown, prompt).strip() == expected.strip(), "blanks that are all there is are nobody's"


THOUGHT = "<think>one. two.</think>\n\nthree\n\nfour. five"


# The model's own drafts, all right, however long they take: on a busy machine an engine leaves drafts out.
DRAFTS = {"model": str(model_path()), "num_speculative_tokens": 3, "adaptive": False}
ENGINES = {
    "plain": {},
    "chunks and preemptions": {"max_num_batched_tokens": 16, "num_gpu_blocks_override": 24, "block_size": 4},
    "drafts": {"speculative_config": DRAFTS},
}


@pytest.fixture(scope="module", params=ENGINES)
def llm(request):
    return LLM(str(model_path()), max_num_seqs=2, **ENGINES[request.param])


@pytest.mark.parametrize(
    ("stop", "after", "expected"),
    [
        (["."], True, "<think>one. two.</think>\n\nthree\n\nfour"),
        (["."], False, "<think>one"),
        (["\n\n"], True, "<think>one. two.</think>\n\nthree"),
        (["two", "five"], True, "<think>one. two.</think>\n\nthree\n\nfour. "),
        (["</think>", "<think>", "e"], True, "<think>one. two.</think>\n\nthr"),
        (["</think>"], True, THOUGHT),
        (["</think>"], False, "<think>one. two."),
    ],
)
def test_stop_strings_count_behind_the_thought(llm, stop, after, expected):
    form = StructuredOutputsParams(choice=[THOUGHT])
    params = SamplingParams(temperature=0, max_tokens=100, stop=stop, stop_after_thought=after, structured_outputs=form)
    outputs = llm.generate(["There was a fox named", "a b c d e f g h"], params, use_tqdm=False)
    for output in outputs:
        (one,) = output.outputs
        assert one.text == expected
        found = next((s for s in stop if THOUGHT[len(expected) :].startswith(s)), None)
        assert (one.finish_reason, one.stop_reason) == ("stop", found)
        tokens = llm.get_tokenizer().decode(one.token_ids)
        assert tokens.startswith(expected) and (found is None or found in tokens[len(expected) :])


def test_stop_strings_count_in_the_final_channel(llm):
    text = "<|channel|>analysis<|message|>final. a<|end|><|start|>assistant<|channel|>final<|message|>It is final. a."
    form = StructuredOutputsParams(choice=[text])
    for stop, expected in ((".", "It is final"), ("final", "It is "), ("<|", None), ("s a", None), ("a", "It is fin")):
        options = {"structured_outputs": form, "stop_after_thought": {"kind": "channels"}}
        params = SamplingParams(temperature=0, max_tokens=200, stop=stop, **options)
        (output,) = llm.generate("a", params, use_tqdm=False)
        said = output.outputs[0].text.rpartition("<|message|>")[2]
        assert said == (expected or "It is final. a."), stop
        assert output.outputs[0].stop_reason == (expected and stop)


@pytest.mark.parametrize("stop", ["<", "<t", "<th"])
def test_what_may_begin_a_thought_and_does_not(llm, stop):
    """The output ends, or goes on otherwise, before it is decided."""
    for text in (f"{stop}ing", stop):
        form = StructuredOutputsParams(choice=[text])
        params = SamplingParams(temperature=0, stop=stop, stop_after_thought=True, structured_outputs=form)
        (output,) = llm.generate("a", params, use_tqdm=False)
        assert (output.outputs[0].text, output.outputs[0].stop_reason) == ("", stop)


@pytest.mark.parametrize("place", [3, 9, 14, 22])
def test_any_text_behind_the_thoughts_end_may_stop_an_output(llm, place, request):
    """The end of the thought is wherever a word of what the model writes is."""
    prompts = ["There was a fox named", "One two. One two. One two. One two. One"]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    outputs, stats = llm.generate(prompts, params, use_tqdm=False), llm.engine.stats
    kind = request.node.callspec.params["llm"]
    assert bool(stats.preemptions) == (kind == "chunks and preemptions"), "else it would show nothing"
    assert bool(stats.num_accepted_tokens) == (kind == "drafts")
    for prompt, whole in zip(prompts, outputs, strict=True):
        text = whole.outputs[0].text
        end = text[place : place + 4].strip()
        begins = text.index(end) + len(end)
        begins += len(text[begins:]) - len(text[begins:].lstrip())
        stop = text[begins + 6 : begins + 8]
        form = {"begin": "<t>", "end": end, "inside": True}
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop=stop, stop_after_thought=form)
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        assert output.outputs[0].text == text[: text.index(stop, begins)]
        assert output.outputs[0].stop_reason == stop
