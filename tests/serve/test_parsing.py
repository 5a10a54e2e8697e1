"""Reading answers: each format, and that it does not matter how the text is cut."""

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic_core import from_json
from support.examples import examples

from tritonllm.config.thought_format import ThoughtFormat
from tritonllm.serve.parsing.choose import Formats, check_names, choose, reasoning_parser_of, tool_parser_of
from tritonllm.serve.parsing.objects import Objects
from tritonllm.serve.parsing.pieces import Arguments, ParsedAnswer, ToolCall, ToolCallBegin, read
from tritonllm.serve.parsing.source import SourceReader
from tritonllm.serve.parsing.tools import named, required

DEEPSEEK = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
DEEPSEEK_CALL = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
DEEPSEEK_31_CALL = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
HARMONY_CALL = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}"


def hermes(calls):
    return "\n".join(f'<tool_call>\n{{"name": "{name}", "arguments": {args}}}\n</tool_call>' for name, args in calls)


def llama(calls):
    return "; ".join(f'{{"name": "{name}", "parameters": {args}}}' for name, args in calls)


def mistral_list(calls):
    objects = (f'{{"name": "{name}", "arguments": {args}}}' for name, args in calls)
    return f"[TOOL_CALLS] [{', '.join(objects)}]"


def mistral_plain(calls):
    return "".join(f"[TOOL_CALLS]{name}{args}" for name, args in calls)


def mistral_args(calls):
    return "".join(f"[TOOL_CALLS]{name}[CALL_ID]a1b2c3d4e[ARGS]{args}" for name, args in calls)


def deepseek(calls):
    return DEEPSEEK.format("\n".join(DEEPSEEK_CALL.format(*call) for call in calls))


def deepseek_31(calls):
    return DEEPSEEK.format("".join(DEEPSEEK_31_CALL.format(*call) for call in calls))


def harmony(calls):
    return "<|call|><|start|>assistant".join(HARMONY_CALL.format(*call) for call in calls)


WRITERS = {
    "hermes": [hermes],
    "llama3_json": [llama],
    "mistral": [mistral_list, mistral_plain, mistral_args],
    "deepseek_v3": [deepseek, deepseek_31],
    "deepseek_v31": [deepseek_31],
    "openai": [harmony],
}
PAIRS = [(parser, writer) for parser, writers in WRITERS.items() for writer in writers]
NAMES = ["get_weather", "add", "files.read-2"]
CALLS = [("get_weather", '{"city": "Köln \\"}]\\" <b>", "days": [1, 2, {"x": null}]}'), ("add", "{}")]
MARKERS = [
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<think>", "</think>", "<|python_tag|>"),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
    *("<|channel|>", "<|message|>", "analysis", "commentary", "to=functions.add", "<|end|>", "<|start|>", "<|call|>"),
    *(
        '{"name": "add"',
        '"name"',
        "{",
        "}",
        "[",
        "]",
        '"',
        ":",
        ",",
        ";",
        "\\",
        '"arguments": ',
        "null",
        "add",
        " ",
        "\n",
    ),
    *("```json\n", "é", "<", "a"),
]
NOISE = st.lists(st.sampled_from(MARKERS), max_size=25).map("".join)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(st.text(max_size=8), JSON, max_size=3).map(
    lambda value: json.dumps(value, ensure_ascii=False)
)


def reader(parser, reasoning=None, prompt=""):
    return Formats(parser, reasoning).reader(prompt, NAMES)


def cut(text, places):
    ends = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[begin:end] for begin, end in pairwise(ends)]


def test_the_engine_learns_how_thoughts_are_written():
    """Where stop strings count must be where the reader finds the answer."""
    tags = {"kind": "tags", "begin": "<think>", "end": "</think>"}
    channels = ThoughtFormat(kind="channels")
    for formats, prompt, tools, has_form, expected in (
        (Formats("hermes", None), "x<think>", NAMES, False, None),
        (Formats(None, "qwen3"), "x", [], False, ThoughtFormat(**tags, inside=False)),
        (Formats(None, "qwen3"), "x<think>\n", [], False, ThoughtFormat(**tags, inside=True)),
        (Formats(None, "qwen3"), "x<think>\n", [], True, ThoughtFormat(**tags, inside=False)),
        (Formats(None, "deepseek_r1"), "x", [], False, ThoughtFormat(**tags, inside=True)),
        (Formats(None, "openai_gptoss"), "x", [], False, channels),
        (Formats("openai", None), "x", NAMES, False, channels),
        (Formats("openai", None), "x", [], False, None),
        (Formats(None, "openai_gptoss"), "x", [], True, None),
    ):
        assert formats.thought(prompt, tools, has_form=has_form) == expected


def test_a_call_without_its_end_takes_no_other_with_it():
    calls = (
        '<tool_call>{"name": "add", "arguments": {}}}\n<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    )
    assert read(reader("hermes"), calls) == ParsedAnswer(calls=[ToolCall("add", "{}"), ToolCall("add", '{"a": 1}')])


@pytest.mark.parametrize(("parser", "writer"), PAIRS)
def test_calls_of_each_format(parser, writer):
    answer = read(reader(parser), writer(CALLS))
    assert answer == ParsedAnswer(calls=[ToolCall(*call) for call in CALLS])


@settings(max_examples=examples(60), deadline=None)
@given(
    calls=st.lists(st.tuples(st.sampled_from(NAMES), ARGUMENTS), min_size=1, max_size=3),
    places=st.lists(st.integers(0, 5000)),
)
@pytest.mark.parametrize(("parser", "writer"), PAIRS)
def test_any_arguments_come_back_however_the_text_is_cut(parser, writer, calls, places):
    answer = read(reader(parser), *cut(writer(calls), places))
    assert answer == ParsedAnswer(calls=[ToolCall(*call) for call in calls])


def as_object(*texts):
    """The object that a client is sent in these pieces."""
    (call,) = read(Objects(Calls()), *texts).calls
    return call.arguments


class Calls:
    """A reader of one call, all of whose text is arguments."""

    def __init__(self):
        self._begun = False

    def feed(self, text):
        begin, self._begun = [] if self._begun else [ToolCallBegin(0, "f")], True
        return [*begin, Arguments(0, text)]

    def finish(self):
        return []


@settings(max_examples=examples(200), deadline=None)
@given(text=ARGUMENTS, places=st.lists(st.integers(0, 5000)))
def test_an_object_stays_what_it_is(text, places):
    assert json.loads(as_object(*cut(text, places))) == json.loads(text)


PARTS = ["{", "}", "[", "]", '"', ":", ",", '"a"', "1", "-", "e5", "tru", "true", "null", "\\", "\\u00e", "\\ud83d"]
PARTS += ["\\ude00", "\n", " ", "é", '{"a": ', "[[", '"b": "', "0"]


@settings(max_examples=examples(500), deadline=None)
@given(text=st.lists(st.sampled_from(PARTS), max_size=20).map("".join) | ARGUMENTS, places=st.lists(st.integers(0, 99)))
def test_any_text_is_an_object_however_it_is_cut(text, places):
    whole = as_object(text)
    assert isinstance(json.loads(whole), dict)
    assert from_json(whole) == json.loads(whole), "by the parser of Anthropic's package, too"
    assert as_object(*cut(text, places)) == whole


@settings(max_examples=examples(200), deadline=None)
@given(text=ARGUMENTS, end=st.integers(0, 5000))
def test_what_breaks_off_has_what_came(text, end):
    cut_off, value = json.loads(as_object(text[: end % (len(text) + 1)])), json.loads(text)
    assert list(cut_off) == list(value)[: len(cut_off)]
    for name in list(cut_off)[:-1]:
        assert cut_off[name] == value[name]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "{}"),
        (' {"a" : 1 , "b":[ ] }  x', '{"a":1,"b":[]}'),
        ('{"a": "\\ud83d"}', '{"a":"\ufffd"}'),
        ('{"a": "\\ud83d\\ude00\\u00e9\\/"}', '{"a":"\\ud83d\\ude00\\u00e9\\/"}'),
        ('{"a": "\\d+\t\\', '{"a":"\\\\d+\\t"}'),
        ('{"a": "x\\u00', '{"a":"x"}'),
        ('{"a": 1 "b": 2}', '{"a":1}'),
        ('{"a": 01, "b": 2}', "{}"),
        ('{"a": {"b": [1, 2', '{"a":{"b":[1,2]}}'),
        ('{"a": 1}{"b": 2}', '{"a":1}'),
        ('{"a": ' + "9" * 5000 + "}", '{"a":' + "9" * 5000 + "}"),
    ],
)
def test_arguments_as_objects(text, expected):
    assert as_object(text) == as_object("", *text) == expected


def test_arguments_that_are_nested_too_deep():
    text = as_object('{"a": ' + "[" * 100_000)
    assert len(text) < 200 and isinstance(json.loads(text), dict)


READERS = [(parser, None) for parser in WRITERS] + [
    (None, "qwen3"),
    (None, "deepseek_r1"),
    (None, "openai_gptoss"),
    ("hermes", "qwen3"),
    ("deepseek_v3", "deepseek_r1"),
]


@settings(max_examples=examples(300), deadline=None)
@given(text=NOISE, places=st.lists(st.integers(0, 5000), max_size=12))
@pytest.mark.parametrize(("parser", "reasoning"), READERS)
def test_any_text_reads_the_same_however_it_is_cut(parser, reasoning, text, places):
    whole = read(reader(parser, reasoning), text)
    assert read(reader(parser, reasoning), *cut(text, places)) == whole
    assert read(reader(parser, reasoning), *text) == whole


@settings(max_examples=examples(100), deadline=None)
@given(text=NOISE, places=st.lists(st.integers(0, 500), max_size=5))
def test_forced_calls_read_the_same_however_they_are_cut(text, places):
    for body, *args in ((required,), (named, "add")):
        assert read(SourceReader(body, *args), *cut(text, places)) == read(SourceReader(body, *args), text)


@pytest.mark.parametrize("parser", ["hermes", "mistral", "deepseek_v3", "llama3_json"])
@pytest.mark.parametrize(
    "text",
    [
        *(
            "Hello.\n",
            "  two  \n\n spaces ",
            "<tool_call",
            "a <tool_call> b",
            "<tool_call>{}</tool_call> ok",
            "[TOOL_CALLS]",
        ),
        *(
            '{"a": 1}',
            '{"name": "Bob", "age": 3}',
            '{"name": 5}',
            "[TOOL_CALLS] so to speak",
            "[TOOL_CALLS][]",
            "{",
            "; x",
        ),
        *(
            '<tool_call>{"arguments": {"a": [',
            "<｜tool▁calls▁begin｜>what<｜tool▁calls▁end｜>",
            "<｜tool▁calls▁begin｜>",
        ),
    ],
)
def test_what_is_no_call_stays_to_the_letter(parser, text):
    assert read(reader(parser), text) == ParsedAnswer(content=text)


def test_text_around_calls():
    text = f"Let me look.\n\n{hermes(CALLS)}\nDone."
    answer = read(reader("hermes"), text)
    assert (answer.content, [call.name for call in answer.calls]) == ("Let me look.\nDone.", ["get_weather", "add"])
    answer = read(reader("mistral"), f"Let me look. {mistral_plain(CALLS)}\n")
    assert (answer.content, len(answer.calls)) == ("Let me look.", 2)


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('<tool_call>{"name": "add", "arguments": {"a": "x', '{"a": "x'),
        ('<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>', '{"a": 1}'),
        ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', '{"a": 1}'),
        ('<tool_call>{"name": "add", "arguments": null}</tool_call>', "{}"),
        ('<tool_call>{"name": "add"}</tool_call>', "{}"),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}}}</tool_call>', '{"a": 1}'),
        ('<tool_call>{"id": "7", "name": "add", "arguments": {"a": 1}, "more": [1]}', '{"a": 1}'),
    ],
)
def test_calls_that_are_not_as_they_should_be(text, arguments):
    assert read(reader("hermes"), text) == ParsedAnswer(calls=[ToolCall("add", arguments)])


def test_arguments_are_sent_as_they_come():
    streamed = reader("hermes")
    head = streamed.feed('<tool_call>{"name": "add", "arguments": {"a": ')
    assert read_all(head) == ParsedAnswer(calls=[ToolCall("add", '{"a": ')])
    assert read_all([*head, *streamed.feed("12")]).calls[0].arguments == '{"a": 12'


def read_all(pieces):
    return ParsedAnswer().add(pieces)


@pytest.mark.parametrize(
    ("reasoning", "prompt", "text", "expected"),
    [
        ("qwen3", "", "<think>\nHm.\n</think>\n\nHi.\n", ParsedAnswer("Hm.", "Hi.\n")),
        ("qwen3", "", "Hi.", ParsedAnswer("", "Hi.")),
        ("qwen3", "<think>\n", "Hm.\n</think>\n\nHi.", ParsedAnswer("Hm.", "Hi.")),
        ("qwen3", "<think>\n\n</think>\n\n", "Hi.", ParsedAnswer("", "Hi.")),
        ("qwen3", "", "<think>\nHm, and", ParsedAnswer("Hm, and", "")),
        ("deepseek_r1", "<｜Assistant｜>", "Hm.</think>Hi.", ParsedAnswer("Hm.", "Hi.")),
        ("deepseek_r1", "<think>\n", "<think>Hm.</think>Hi.", ParsedAnswer("Hm.", "Hi.")),
        ("deepseek_r1", "</think>", "Hi.", ParsedAnswer("", "Hi.")),
        (
            "openai_gptoss",
            "",
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi.",
            ParsedAnswer("Hm.", "Hi."),
        ),
        ("openai_gptoss", "", "<|channel|>final<|message|>Hi.<|return|>", ParsedAnswer("", "Hi.")),
        ("openai_gptoss", "", " no format at all", ParsedAnswer("", " no format at all")),
    ],
)
def test_thoughts(reasoning, prompt, text, expected):
    formats = Formats(None, reasoning)
    assert read(formats.reader(prompt, ()), text) == expected


def test_an_answer_with_a_form_does_not_go_on_with_a_thought():
    for name in ("qwen3", "deepseek_r1"):
        text = '{"a": 1}'
        assert read(Formats(None, name).reader("<think>\n", (), has_form=True), text) == ParsedAnswer("", text)
        assert read(Formats(None, name).reader("<think>\n", ()), text) == ParsedAnswer(text, "")


def test_thoughts_and_calls():
    answer = read(reader("hermes", "qwen3"), f"<think>\nI need it.\n</think>\n\n{hermes(CALLS)}")
    assert answer == ParsedAnswer("I need it.", "", [ToolCall(*call) for call in CALLS])
    mixed = "<|channel|>analysis<|message|>I need it.<|end|><|start|>assistant" + harmony(CALLS)
    assert read(reader("openai", "openai_gptoss"), mixed) == answer


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("<tool_call> {name, arguments} </think>", "hermes", "qwen3"),
        ("<tool_call><function=f><parameter=a> arguments", None, None),
        ("[AVAILABLE_TOOLS][TOOL_CALLS]", "mistral", None),
        ("<｜tool▁calls▁begin｜></think>", "deepseek_v3", "qwen3"),
        ("<|channel|>analysis", "openai", "openai_gptoss"),
        ('<|start_header_id|> {"name": function name, "parameters": dictionary of it}', "llama3_json", None),
        ("<|im_start|>", None, None),
    ],
)
def test_the_template_tells_the_format(template, tools, reasoning):
    assert (tool_parser_of(template), reasoning_parser_of(template)) == (tools, reasoning)


def test_a_long_text_without_end_is_read_in_linear_time():
    """Nothing is read again and again: with quadratic time this would take minutes."""
    for parser in WRITERS:
        one = reader(parser)
        for _ in range(20_000):
            one.feed('<tool_call>{"a": [')
        one.finish()


class Token(str):
    special = True


class Tokenizer:
    chat_template = "[TOOL_CALLS] </think>"
    added_tokens_decoder = {5: Token("[TOOL_CALLS]")}  # noqa: RUF012


def test_special_tokens_are_kept_where_they_begin_a_call():
    formats = choose(Tokenizer(), None, None, None)
    assert (formats.tools, formats.reasoning) == ("mistral", "qwen3")
    assert formats.needs_special_tokens(True) and not formats.needs_special_tokens(False)
    assert not choose(Tokenizer(), None, "hermes", None).needs_special_tokens(True)
    assert choose(Tokenizer(), "own template", None, "none") == Formats(None, None, frozenset({"[TOOL_CALLS]"}))
    with pytest.raises(ValueError, match=r"--tool-call-parser must be one of hermes.* or none, got 'hermit'"):
        check_names("hermit", None)
