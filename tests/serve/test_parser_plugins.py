"""Parsers of one's own, from Python files."""

import pytest

from tritonllm.config.thought_format import ThoughtFormat
from tritonllm.serve.api.config import ServerConfig
from tritonllm.serve.parsing.choose import Formats, check_names, choose
from tritonllm.serve.parsing.pieces import ParsedAnswer, ToolCall, read
from tritonllm.serve.parsing.plugins import Plugins, load_plugins

FILE = """
from tritonllm.serve.parsing.pieces import Arguments, Content, Reasoning, ToolCallBegin
from tritonllm.serve.parsing.reasoning import Thoughts


class Calls:
    markers = ("<call>",)

    def __init__(self, tools):
        self.tools, self.text = tools, ""

    def feed(self, text):
        self.text += text
        return []

    def finish(self):
        said, call, arguments = self.text.partition("<call>")
        found = [Content(said)] if said else []
        return [*found, ToolCallBegin(0, min(self.tools)), Arguments(0, arguments)] if call else found


class Aloud:
    markers = ("|",)

    def __init__(self, prompt):
        self.thinks = prompt.endswith("?")

    def feed(self, text):
        thought, bar, said = text.partition("|") if self.thinks else ("", "", text)
        return [Reasoning(thought), Content(said)]

    def finish(self):
        return []


TOOL_PARSERS = {"mine": Calls, "hermes": Calls}
REASONING_PARSERS = {"tags": Thoughts("<t>", "</t>"), "aloud": Aloud}
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(FILE)
    return str(path)


@pytest.fixture
def own(file):
    return load_plugins(file, file)


class Token(str):
    special = True


class Tokenizer:
    added_tokens_decoder = {5: Token("<call>"), 6: Token("|")}  # noqa: RUF012


@pytest.mark.parametrize("name", ["mine", "hermes"])
def test_calls(own, name):
    formats = Formats(name, "tags", own=own)
    answer = read(formats.reader("", ["add", "sub"]), "<t>Hm.</t>So.<call>", "{}")
    assert answer == ParsedAnswer("Hm.", "So.", [ToolCall("add", "{}")])
    assert formats.thought("<t>", []) == ThoughtFormat(kind="tags", begin="<t>", end="</t>", inside=True)
    assert not formats.may_think(""), "a grammar waits for tags that are tokens of a known model only"


def test_thoughts(own):
    formats = Formats(None, "aloud", own=own)
    assert read(formats.reader("?", []), "Hm.|So.") == ParsedAnswer("Hm.", "So.")
    assert read(formats.reader("!", []), "Hm.|So.") == ParsedAnswer("", "Hm.|So.")
    assert read(formats.reader("?", [], has_form=True), "1|2") == ParsedAnswer("", "1|2")
    assert formats.thought("?", []) is None and not formats.may_think("?")


def test_their_markers_are_not_left_out(own):
    assert not choose(Tokenizer(), None, None, None, own).needs_special_tokens(True)
    calls = choose(Tokenizer(), None, "mine", "tags", own)
    assert calls.needs_special_tokens(True) and not calls.needs_special_tokens(False)
    assert choose(Tokenizer(), None, None, "aloud", own).needs_special_tokens(False)


def test_their_names_are_known(file, own):
    check_names("mine", "aloud", own)
    with pytest.raises(ValueError, match=r"--tool-call-parser must be one of hermes.*, mine, auto or none, got 'x'"):
        check_names("x", None, own)
    ServerConfig(model_names=("m",), tool_call_parser="mine", tool_parser_plugin=file)
    with pytest.raises(ValueError, match="--reasoning-parser must be one of"):
        ServerConfig(model_names=("m",), reasoning_parser="aloud", tool_parser_plugin=file)


def test_without_a_file_there_are_none():
    assert load_plugins(None, None) == Plugins()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 +", "--tool-parser-plugin: .*own.py cannot be run: SyntaxError"),
        ("import no_such_module", "cannot be run: ModuleNotFoundError"),
        ("raise RuntimeError('no')", "cannot be run: RuntimeError: no"),
        ("", "own.py must have TOOL_PARSERS, a dict from names to classes"),
        ("TOOL_PARSERS = {1: int}", "must have TOOL_PARSERS, a dict"),
        ("TOOL_PARSERS = {'a': 1}", r"TOOL_PARSERS\['a'\] in .*own.py must be a class, got 1"),
    ],
)
def test_what_is_wrong_with_a_file(text, message, tmp_path):
    path = tmp_path / "own.py"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_plugins(str(path), None)


@pytest.mark.parametrize("path", ["none.py", "", "tests", "own.txt"])
def test_a_file_that_is_none(path):
    with pytest.raises(ValueError, match="--reasoning-parser-plugin must be a Python file"):
        load_plugins(None, path)
