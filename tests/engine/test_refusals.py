"""What a user reads of a grammar that cannot be used: the place and this project's words, and no library's."""

import random
import re

import pytest

from tritonllm.config.sampling_params import StructuredOutputsParams
from tritonllm.engine.grammar import grammar, guidance

pytest.importorskip("llguidance")
BACKENDS = {"xgrammar": grammar.parse, "guidance": guidance.parse}
EBNF = [
    ('root ::= "a" b\nb ::= "x', "line 2, column 9: a text needs a double quote at its end"),
    ('root ::= "é" b\n', "line 1, column 14: the rule 'b' is not defined: add a line b ::= "),
    ('start ::= "a"', "line 1, column 1: the grammar has no rule 'root', which an output begins with"),
    ("  \n", "line 1, column 1: the grammar has no rule 'root'"),
    ('root ::= ("a" | "b"\nb ::= "c"', r"line 2, column 1: expected '\)' for the '\(' of line 1, column 10"),
    ('root ::= ((("a")', r"line 1, column 17: expected '\)' for the '\(' of line 1, column 11"),
    ("root ::= [a-", "line 1, column 13: a set of characters needs a ']' at its end"),
    ("root ::= [b-dz-a]", "line 1, column 14: in 'z-a' the second character comes before the first"),
    ('root ::= "é\\q"', r"line 1, column 12: '\\\\q' is no escape"),
    ('root ::= "\\', "line 1, column 12: a text needs a double quote"),
    ('root ::= "a"{3,1}', "line 1, column 13: in '.3,1.' the second number is the smaller one"),
    ('root ::= "a"{x}', "line 1, column 13: expected how often: .2., .2,. or .2,5."),
    ('root ::= * "a"', r"line 1, column 10: '\*' behind nothing that it could repeat"),
    ('root ::= "a"**', r"line 1, column 14: '\*' behind nothing that it could repeat"),
    ('root ::= "a")', r"line 1, column 13: '\)' without a '\(' before it"),
    ('root := "a"', "line 1, column 5: expected '::=' behind the name of the rule"),
    ('"x" ::= "a"', "line 1, column 1: expected the name of a rule"),
    ('root ::= "a" x ::= "b"', "line 1, column 14: a rule begins on a line of its own"),
    ("root ::= 'a'", "line 1, column 10: a text stands in double quotes"),
    ('root ::= "é\ud800"', "line 1, column 12: half of a surrogate pair is no character"),
    ('root ::= "é" ;', "line 1, column 14: expected \"text\", .* got ';'"),
    ('root ::= "a" # b\n  ;é', "line 2, column 3: expected \"text\", .* got ';'"),
]
OF_XGRAMMAR = [
    ('root ::= "a" | ', 'line 1, column 16: expected "text"'),
    ('root ::= "a"\nroot ::= "b"', "line 2, column 1: the rule 'root' is defined a second time"),
    ('é ::= "a"\nroot ::= é', "line 1, column 1: expected rules as in root ::="),
    ('root ::= Token("x")', "line 1, column 1[0-9]: expected rules as in root ::="),
]
OF_GUIDANCE = [
    ('root ::= "a"\n  | "b"', "line 2, column 3: expected the name of a rule and '::=': an alternative ends with"),
    ('start: "a" b\nb: "c', 'line 2, column 6: expected rules as in start: "text"'),
    ('start: "a" b\n', "line 1, column 8: the rule or token 'b' is not defined"),
    ("start: /(/\n", "line 1, column 8: its regular expression cannot be followed"),
    ('start: A\nA: A "a"\n', "line 2, column 4: the token 'A' holds itself"),
    ('start: "a"\nstart: "b"', "line 2, column 8: 'start' is defined a second time"),
    ('start: "a"~3..1\n', "line 1, column 8: the second number of a repetition is the smaller one"),
    ('start: %json {"type": 3}\n', "line 1, column 8: its JSON schema cannot be kept"),
    ("start: @foo\n", "expected rules as in start: "),
    ("root ::= " + "(" * 5000 + '"a"' + ")" * 5000, "its parentheses are nested too deep"),
]
LIBRARIES = re.compile(
    r"\.cc|lexer|parser|regex parse|llguidance|xgrammar|codec|\^|found|\[\d\d:|Expect(ed)? name|Rule "
)


CASES = [
    pytest.param(name, text, message, id=f"{name}-{text[:20]!r}")
    for name, own in (("xgrammar", OF_XGRAMMAR), ("guidance", OF_GUIDANCE))
    for text, message in [*EBNF, *own]
]


@pytest.mark.parametrize(("backend", "text", "message"), CASES)
def test_a_grammar_that_cannot_be_read_is_told_by_its_place(backend, text, message):
    with pytest.raises(ValueError, match=f"^structured_outputs: grammar cannot be used: {message}") as caught:
        BACKENDS[backend](StructuredOutputsParams(grammar=text))
    assert type(caught.value) is ValueError and not LIBRARIES.search(str(caught.value))


GOOD = 'root ::= "a" (b | [c-e]+ "\\n")? # é\n\nb ::= "x"{1,3} | d\nd ::= "é" ([^"] | "y")*\n'
JUNK = '"\\[](){}|*+?:=#-é;\n. ab1,<'


@pytest.mark.parametrize("backend", BACKENDS)
def test_whatever_is_wrong_has_a_place_and_no_librarys_words(backend):
    rng = random.Random(7)
    refused = 0
    for _ in range(400):
        text = list(GOOD)
        for _ in range(rng.choice([1, 1, 2, 4])):
            at = rng.randrange(len(text))
            text[at : at + rng.randrange(3)] = rng.choice(JUNK) * rng.randrange(2)
        try:
            BACKENDS[backend](StructuredOutputsParams(grammar="".join(text)))
        except ValueError as error:
            assert type(error) is ValueError
            said, refused = str(error).removeprefix("structured_outputs: grammar cannot be used: "), refused + 1
            place = re.match(r"line (\d+), column (\d+): ", said)
            assert place or said.startswith("no text of its rule"), ("".join(text), said)
            assert not place or 1 <= int(place[1]) <= text.count("\n") + 1
            assert not LIBRARIES.search(re.sub(r"'.*?'|: add a line .*", "", said)), said
    assert refused > 100


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"regex": "a("}, "regex cannot be used: it has an opening parenthesis without a closing one"),
        ({"regex": "a(?=b)"}, "regex has a lookahead"),
        ({"regex": r"\1"}, r"regex cannot be used: it has the escape '\\1'"),
        ({"json": {"const": "\ud800"}}, "json has half of a surrogate pair"),
        ({"json": '{"const": "\\ud800"}'}, "json has half of a surrogate pair"),
        ({"json": '{"type": "array", "title": "\\ud83d\\ude00", "uniqueItems": true}'}, "json has 'uniqueItems'"),
        ({"choice": ["a", "\ud800"]}, "choice has half of a surrogate pair"),
        ({"regex": "a\ud800"}, "regex cannot be used: it has a class without characters"),
        ({"json": {"type": "array", "uniqueItems": True}}, "json has 'uniqueItems', which a grammar cannot keep"),
        ({"json": {"type": "string", "format": "iri"}}, "json has 'format': 'iri', which a grammar cannot keep"),
        (
            {"json": {"type": "string", "pattern": "a("}},
            "json has ('pattern' with an op|a pattern that)",
        ),
    ],
)
def test_so_has_what_is_no_grammar(backend, wish, message):
    with pytest.raises(ValueError, match=f"^structured_outputs: {message}") as caught:
        BACKENDS[backend](StructuredOutputsParams(**wish))
    assert not LIBRARIES.search(str(caught.value))
