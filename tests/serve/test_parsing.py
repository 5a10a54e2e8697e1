"""Reading answers: each format, and that it does not matter how the text is cut."""

import json
import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic_core import from_json
from support.examples import examples

from tritonllm.config.thought_format import ThoughtFormat
from tritonllm.serve.parsing.choose import Formats, check_names, choose, reasoning_parser_of, tool_parser_of
from tritonllm.serve.parsing.formats import REASONING_PARSERS, TOOL_PARSERS
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


def tagged_list(begin, end=""):
    def write(calls):
        objects = (f'{{"name": "{name}", "arguments": {args}}}' for name, args in calls)
        return f"{begin}[{', '.join(objects)}]{end}"

    return write


def kimi(calls):
    texts = (
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{args}<|tool_call_end|>"
        for index, (name, args) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{''.join(texts)}<|tool_calls_section_end|>"


def bare(value):
    """A value as templates write it between tags."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def xml(call, parameter, around="{}", between="\n"):
    """What writes calls in tags: those of a call, of an argument, and of all calls."""

    def write(calls):
        texts = []
        for name, args in calls:
            arguments = "".join(parameter.format(key, bare(value)) for key, value in json.loads(args).items())
            texts.append(call.format(name, arguments))
        return around.format(between.join(texts))

    return write


LINES = "<parameter={}>\n{}\n</parameter>\n"
qwen = xml("<tool_call>\n<function={}>\n{}</function>\n</tool_call>", LINES)
qwen_in_one = xml("<function={}>\n{}</function>", LINES, "<tool_call>\n{}\n</tool_call>")
seed = xml("<seed:tool_call>\n<function={}>\n{}</function>\n</seed:tool_call>", "<parameter={}>{}</parameter>\n")
glm = xml("<tool_call>{}\n{}</tool_call>", "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n")
glm_47 = xml("<tool_call>{}{}</tool_call>", "<arg_key>{}</arg_key><arg_value>{}</arg_value>", between="")
MINIMAX = "<minimax:tool_call>\n{}\n</minimax:tool_call>"
minimax = xml('<invoke name="{}">\n{}</invoke>', '<parameter name="{}">{}</parameter>\n', MINIMAX)


def python_calls(calls):
    for name, args in calls:
        yield f"{name}({', '.join(f'{key}={value!r}' for key, value in json.loads(args).items())})"


def pythonic(calls):
    return f"[{', '.join(python_calls(calls))}]"


def llama4(calls):
    return f"<|python_start|>{pythonic(calls)}<|python_end|>"


def olmo(calls):
    return "<function_calls>\n{}\n</function_calls>".format("\n".join(python_calls(calls)))


JSON_WRITERS = {
    "hermes": [hermes],
    "llama3_json": [llama],
    "mistral": [mistral_list, mistral_plain, mistral_args],
    "deepseek_v3": [deepseek, deepseek_31],
    "openai": [harmony],
    "hunyuan_a13b": [tagged_list("<tool_calls>", "</tool_calls>")],
    "granite": [tagged_list("<|tool_call|>"), tagged_list("<tool_call>"), tagged_list("<function_call>")],
    "phi4_mini_json": [tagged_list("functools"), tagged_list("<|tool_call|>", "<|/tool_call|>")],
    "kimi_k2": [kimi],
}
TYPED_WRITERS = {  # the arguments are made JSON of
    "qwen3_coder": [qwen, qwen_in_one],
    "seed_oss": [seed],
    "glm45": [glm, glm_47],
    "minimax_m2": [minimax],
    "pythonic": [pythonic],
    "llama4_pythonic": [pythonic, llama4],
    "olmo3": [olmo],
}
ALIASES = {
    "llama4_json": "llama3_json",
    "deepseek_v31": "deepseek_v3",
    "qwen3_xml": "qwen3_coder",
    "glm47": "glm45",
    "granite4": "hermes",
    "ernie45": "hermes",
}
WRITERS = JSON_WRITERS | TYPED_WRITERS
PAIRS = [(parser, writer) for parser, writers in WRITERS.items() for writer in writers]
JSON_PAIRS = [(parser, writer) for parser, writer in PAIRS if parser in JSON_WRITERS]
NAMES = ["get_weather", "add", "files.read-2"]
CALLS = [("get_weather", '{"city": "Köln \\"}]\\" <b>", "days": [1, 2, {"x": null}]}'), ("add", "{}")]
COMMON = ['{"name": "add"', '"name"', '"arguments": ', "null", "add", "[add(", "a=", "(", ")", "'", "{", "}", "[", "]"]
COMMON += ['"', ":", ",", ";", "\\", " ", "\n", "é", "<", "a", "<think>", "</think>", "```json\n"]
OWN = {  # what the texts of a format have besides its markers
    "openai": ["<|message|>", "analysis", "commentary", "to=functions.add", "<|end|>", "<|start|>", "<|call|>"],
    "kimi_k2": ["functions.add:0"],
    "qwen3_coder": ["<function=add>", "<parameter=a>"],
    "minimax_m2": ['<invoke name="add">', '<parameter name="a">'],
    "hunyuan_a13b": ["<answer>", "</answer>"],
    "granite": ["Here is my thought process:", "Here is my response:"],
}


def noise(parser, reasoning=None):
    parts = [*COMMON]
    for name in (parser, reasoning):
        if name in TOOL_PARSERS:
            parts += [*TOOL_PARSERS[name].markers, *OWN.get(name, ())] * 3
    if REASONING_PARSERS.get(reasoning) is not None:
        parts += [REASONING_PARSERS[reasoning].begin, REASONING_PARSERS[reasoning].end]
    return st.lists(st.sampled_from(parts), max_size=25).map("".join)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(st.text(max_size=8), JSON, max_size=3).map(
    lambda value: json.dumps(value, ensure_ascii=False)
)


KEYS = st.from_regex(r"[a-zA-Z_]\w{0,5}", fullmatch=True).filter(lambda key: not key.startswith("__"))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
TYPED_ARGUMENTS = st.dictionaries(KEYS, VALUES, max_size=3).map(lambda value: json.dumps(value, ensure_ascii=False))
TYPES = {type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}


def reader(parser, reasoning=None, prompt="", tools=NAMES):
    return Formats(parser, reasoning).reader(prompt, tools)


def schemas(calls):
    """Tools whose schemas tell the types of these arguments."""
    tools = {name: {} for name in NAMES}
    for name, args in calls:
        types = {key: {"type": TYPES.get(type(value), "object")} for key, value in json.loads(args).items()}
        tools[name] = {"name": name, "parameters": {"type": "object", "properties": types}}
    return tools


def values(answer):
    return [(call.name, json.loads(call.arguments)) for call in answer.calls]


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
    answer = read(reader(parser, tools=schemas(CALLS)), writer(CALLS))
    assert answer == ParsedAnswer(calls=[ToolCall(*call) for call in CALLS])


def test_every_parser_is_here():
    assert {*WRITERS, *ALIASES} == set(TOOL_PARSERS)
    assert all(TOOL_PARSERS[name] is TOOL_PARSERS[other] for name, other in ALIASES.items())


@settings(max_examples=examples(60), deadline=None)
@given(
    calls=st.lists(st.tuples(st.sampled_from(NAMES), ARGUMENTS), min_size=1, max_size=3),
    places=st.lists(st.integers(0, 5000)),
)
@pytest.mark.parametrize(("parser", "writer"), JSON_PAIRS)
def test_any_arguments_come_back_however_the_text_is_cut(parser, writer, calls, places):
    answer = read(reader(parser), *cut(writer(calls), places))
    assert answer == ParsedAnswer(calls=[ToolCall(*call) for call in calls])


@settings(max_examples=examples(60), deadline=None)
@given(
    calls=st.lists(
        st.tuples(st.sampled_from(NAMES), TYPED_ARGUMENTS), min_size=1, max_size=3, unique_by=lambda call: call[0]
    ),
    places=st.lists(st.integers(0, 5000)),
)
@pytest.mark.parametrize(("parser", "writer"), [pair for pair in PAIRS if pair[0] in TYPED_WRITERS])
def test_typed_arguments_come_back_however_the_text_is_cut(parser, writer, calls, places):
    text = writer(calls)
    answer = read(reader(parser, tools=schemas(calls)), *cut(text, places))
    assert (answer.content, values(answer)) == ("", [(name, json.loads(args)) for name, args in calls])
    assert read(reader(parser, tools=schemas(calls)), *text) == answer


@settings(max_examples=examples(15), deadline=None)
@given(
    calls=st.lists(
        st.tuples(st.sampled_from(NAMES), TYPED_ARGUMENTS), min_size=1, max_size=2, unique_by=lambda call: call[0]
    ),
    data=st.data(),
)
@pytest.mark.parametrize(("parser", "writer"), PAIRS)
def test_calls_that_break_off_have_what_came(parser, writer, calls, data):
    text = writer(calls)
    whole = read(reader(parser, tools=schemas(calls)), text)
    end = data.draw(st.integers(0, len(text)))
    answer = read(reader(parser, tools=schemas(calls)), text[:end])
    assert len(answer.calls) <= len(whole.calls)
    for call, other in zip(answer.calls, whole.calls, strict=False):
        assert call.name == other.name and other.arguments.startswith(call.arguments)
    assert [call.arguments for call in answer.calls[:-1]] == [call.arguments for call in whole.calls][
        : max(len(answer.calls) - 1, 0)
    ]
    objects = read(Objects(reader(parser, tools=schemas(calls))), text[:end])
    assert all(isinstance(json.loads(call.arguments), dict) for call in objects.calls)


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
    *((None, name) for name in REASONING_PARSERS),
    ("hermes", "qwen3"),
    ("deepseek_v3", "deepseek_r1"),
    ("hunyuan_a13b", "hunyuan_a13b"),
    ("kimi_k2", "kimi_k2"),
]


@settings(max_examples=examples(300), deadline=None)
@given(data=st.data(), places=st.lists(st.integers(0, 5000), max_size=12))
@pytest.mark.parametrize(("parser", "reasoning"), READERS)
def test_any_text_reads_the_same_however_it_is_cut(parser, reasoning, data, places):
    text = data.draw(noise(parser, reasoning))
    whole = read(reader(parser, reasoning), text)
    assert read(reader(parser, reasoning), *cut(text, places)) == whole
    assert read(reader(parser, reasoning), *text) == whole
    if parser in TYPED_WRITERS:
        for call in whole.calls:
            complete = call is not whole.calls[-1] or call.arguments.endswith("}")
            assert not complete or isinstance(json.loads(call.arguments), dict)


@settings(max_examples=examples(100), deadline=None)
@given(text=noise("hermes"), places=st.lists(st.integers(0, 500), max_size=5))
def test_forced_calls_read_the_same_however_they_are_cut(text, places):
    for body, *args in ((required,), (named, "add")):
        assert read(SourceReader(body, *args), *cut(text, places)) == read(SourceReader(body, *args), text)


@pytest.mark.parametrize("parser", [name for name in WRITERS if name != "openai"])
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


@pytest.mark.parametrize(
    ("parser", "writer"),
    [pair for pair in PAIRS if pair[0] not in ("openai", "llama3_json", "pythonic", "llama4_pythonic")],
)
def test_text_around_calls_is_kept(parser, writer):
    text = f"Let me look: <b>.\n\n{writer(CALLS)}\nDone. <b"
    for parts in ([text], [*text]):
        answer = read(reader(parser, tools=schemas(CALLS)), *parts)
        assert answer == ParsedAnswer("", "Let me look: <b>.\nDone. <b", [ToolCall(*call) for call in CALLS])


def test_text_behind_calls_that_are_all_of_an_answer():
    for parser, text in (
        ("pythonic", pythonic(CALLS)),
        ("llama4_pythonic", llama4(CALLS)),
        ("llama3_json", llama(CALLS)),
    ):
        answer = read(reader(parser), f"{text}\nDone.")
        assert (answer.content.strip(), len(answer.calls)) == ("Done.", 2)


@pytest.mark.parametrize(
    ("parser", "text", "expected"),
    [
        (
            "pythonic",
            "[add(1, a=x + 1, b={'c': (1, 2)}, d=')', e='\\'')]",
            {"a": "x + 1", "b": {"c": [1, 2]}, "d": ")", "e": "'"},
        ),
        ("pythonic", "[add(a=1]", {"a": 1}),
        ("olmo3", "<function_calls>add(a=true, b=null,)</function_calls>", {"a": True, "b": None}),
        ("glm45", "<tool_call>add</tool_call>", {}),
        (
            "glm45",
            "<tool_call>add<arg_key>a</arg_key>1<arg_key>b</arg_key><arg_value>2</arg_value></tool_call>",
            {"b": 2},
        ),
        ("qwen3_coder", "<tool_call><function=add><parameter=a>1</parameter></tool_call>", {"a": 1}),
        (
            "qwen3_coder",
            "<tool_call><function=add> so <parameter=a>\n{'b': None}\n</parameter> </function>",
            {"a": {"b": None}},
        ),
        ("minimax_m2", '<minimax:tool_call><invoke name="add"></invoke>', {}),
    ],
)
def test_arguments_that_are_not_as_they_should_be(parser, text, expected):
    for parts in ([text], [*text]):
        assert values(read(reader(parser, tools={"add": {}}), *parts)) == [("add", expected)]


def test_a_string_between_tags_is_sent_as_it_comes():
    tools = {"add": {"parameters": {"properties": {"a": {"type": "string"}, "b": {"type": "integer"}}}}}
    streamed = reader("qwen3_coder", tools=tools)
    head = streamed.feed('<tool_call>\n<function=add>\n<parameter=a>\nIt is "so')
    assert read_all(head).calls == [ToolCall("add", '{"a": "It is \\"so')]
    more = streamed.feed("\n") + streamed.feed("and</paramete") + streamed.feed("r>\n<parameter=b>\n1")
    assert read_all([*head, *more]).calls == [ToolCall("add", '{"a": "It is \\"so\\nand"')]


@pytest.mark.parametrize(
    ("written", "name"), [("functions.add:12", "add"), ("add", "add"), (" a:b ", "a:b"), ("functions.a:b:0", "a:b")]
)
def test_names_of_kimi(written, name):
    text = kimi([("add", "{}")]).replace("functions.add:0", written)
    assert read(reader("kimi_k2"), text) == ParsedAnswer(calls=[ToolCall(name, "{}")])


def test_calls_end_a_thought_of_kimi():
    answer = read(reader("kimi_k2", "kimi_k2"), f"<think>I need it. {kimi(CALLS)}")
    assert answer == ParsedAnswer("I need it.", "", [ToolCall(*call) for call in CALLS])


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
        ("glm45", "<|assistant|>", "\n<think>Hm.</think>\nHi.", ParsedAnswer("Hm.", "Hi.")),
        ("glm45", "<|assistant|>\n<think></think>", "\nHi.", ParsedAnswer("", "\nHi.")),
        ("seed_oss", "", "<seed:think>Hm.</seed:think>Hi.", ParsedAnswer("Hm.", "Hi.")),
        ("seed_oss", "<seed:think><seed:cot_budget_reflect>", "Hm.</seed:think>Hi.", ParsedAnswer("Hm.", "Hi.")),
        ("hunyuan_a13b", "", "<think>\nHm.\n</think>\n<answer>\nHi.\n</answer>", ParsedAnswer("Hm.", "Hi.")),
        ("hunyuan_a13b", "", "<think>\n\n</think>\n<answer>\nHi, and", ParsedAnswer("", "Hi, and")),
        ("hunyuan_a13b", "", "Hi.", ParsedAnswer("", "Hi.")),
        (
            "granite",
            "",
            "Here is my thought process: Hm. Here is Here is my response: Hi.",
            ParsedAnswer("Hm. Here is", "Hi."),
        ),
        ("granite", "", "Here is my thought on it.", ParsedAnswer("", "Here is my thought on it.")),
        ("ernie45", "", "Hm.</think>\n\n<response>\nHi.\n</response>\n", ParsedAnswer("Hm.", "Hi.")),
        ("ernie45", "", "Hm.", ParsedAnswer("Hm.", "")),
        ("olmo3", "<think>", "Hm.</think>Hi.", ParsedAnswer("Hm.", "Hi.")),
        ("minimax_m2", "<think>\n", "Hm.\n</think>\n\nHi.", ParsedAnswer("Hm.", "Hi.")),
        ("minimax_m2", "", "Hm.</think>Hi.", ParsedAnswer("Hm.", "Hi.")),
        ("kimi_k2", "", "<think>Hm.</think>Hi.", ParsedAnswer("Hm.", "Hi.")),
        ("mistral", "", "[THINK]Hm.[/THINK]Hi.", ParsedAnswer("Hm.", "Hi.")),
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
        ("<tool_call><function=f><parameter=a> arguments", "qwen3_coder", None),
        ("[AVAILABLE_TOOLS][TOOL_CALLS]", "mistral", None),
        ("<｜tool▁calls▁begin｜></think>", "deepseek_v3", "qwen3"),
        ("<|channel|>analysis", "openai", "openai_gptoss"),
        ('<|start_header_id|> {"name": function name, "parameters": dictionary of it}', "llama3_json", None),
        ("<|im_start|>", None, None),
        (
            "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value> arguments </think>",
            "glm45",
            "glm45",
        ),
        ("set begin = '<seed:tool_call>' <seed:think> <function=f> <parameter=", "seed_oss", "seed_oss"),
        ("<minimax:tool_call> <invoke name= <think> </think> <response>", "minimax_m2", "minimax_m2"),
        ("<|tool_calls_section_begin|> <think></think>", "kimi_k2", "kimi_k2"),
        ("<|im_system|>tool_declare<|im_middle|>", "kimi_k2", None),
        ('<tool_calls>[{"name": "f", "arguments": {}}] <think></think>', "hunyuan_a13b", "qwen3"),
        ("<tool_calls> \"arguments\" '<answer>' '</answer>' <think></think>", "hunyuan_a13b", "hunyuan_a13b"),
        ("<tool_call> arguments <response> </response> </think>", "hermes", "ernie45"),
        ("<function_calls>\nf(a='b')\n</function_calls> <think></think>", "olmo3", "qwen3"),
        ('functools[{"name": [function name], "arguments": {}}]', "phi4_mini_json", None),
        ("'<|tool|>' + message['tools'] + '<|/tool|>'", "phi4_mini_json", None),
        ("<|start_of_role|> <|tool_call|> Here is my thought process: Here is my response:", "granite", "granite"),
        ("<|start_of_role|> <tool_call> arguments", "hermes", None),
        ("<|header_start|> [func_name1(param1=value1), func_name2(...)]", "llama4_pythonic", None),
        ("<|start_header_id|> [func_name1(params_name1=params_value1...)]", "pythonic", None),
        ('<|header_start|> {"name": function name, "parameters": dictionary}', "llama4_json", None),
        ("[TOOL_CALLS] [THINK] [/THINK]", "mistral", "mistral"),
    ],
)
def test_the_template_tells_the_format(template, tools, reasoning):
    assert (tool_parser_of(template), reasoning_parser_of(template)) == (tools, reasoning)


SHAPES = ("hermes", "kimi_k2", "qwen3_coder", "pythonic")  # one of each


@pytest.mark.parametrize(
    "parser", [pytest.param(name, marks=() if name in SHAPES else pytest.mark.long) for name in WRITERS]
)
def test_a_long_text_without_end_is_read_in_linear_time(parser):
    """Nothing is read again and again: with quadratic time, sixteen times the text takes 256 times as long."""
    typed = parser in TYPED_WRITERS
    call = WRITERS[parser][0]([("add", '{"a": "b"}' if typed else '{"a": "')])
    begun = call[: call.rindex("b" if typed else '"')]
    for head in (begun, call[: call.index("add") + 2], ""):
        for part in ("[", "\n ", "a", "\\", '"', *TOOL_PARSERS[parser].markers[:1]):
            times = []
            for count in (500, 8_000):
                one = reader(parser, "qwen3", tools={"add": {}})
                one.feed(head)
                begin = time.process_time()
                for _ in range(count):
                    one.feed(part)
                one.feed(part * count)
                one.finish()
                times.append(time.process_time() - begin)
            assert times[1] < 80 * times[0] + 0.1, (head, part)


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
    for name in (None, "none", "auto", *TOOL_PARSERS):
        check_names(name, None)
    with pytest.raises(ValueError, match=r"--tool-call-parser must be one of hermes.*, auto or none, got 'hermit'"):
        check_names("hermit", None)


def test_the_log_says_what_the_template_told(caplog):
    with caplog.at_level("INFO"):
        choose(Tokenizer(), None, "auto", None)
    assert "--tool-call-parser is mistral: the chat template has '[TOOL_CALLS]'" in caplog.messages
    assert "--reasoning-parser is qwen3: the chat template has '</think>'" in caplog.messages
    caplog.clear()
    choose(Tokenizer(), None, "mistral", "none")
    assert not caplog.messages


def test_auto_that_cannot_be_told_is_an_error():
    assert choose(Tokenizer(), None, "auto", "auto") == choose(Tokenizer(), None, None, None)
    with pytest.raises(
        ValueError, match=r"--tool-call-parser auto: the chat template does not tell .* hermes, .* or none"
    ):
        choose(Tokenizer(), "nothing", "auto", None)
    with pytest.raises(
        ValueError, match=r"--reasoning-parser auto: the chat template does not tell .* qwen3, .* or none"
    ):
        choose(Tokenizer(), "nothing", None, "auto")
    with pytest.raises(ValueError, match="--tool-call-parser auto: there is no chat template"):
        choose(None, None, "auto", None)
