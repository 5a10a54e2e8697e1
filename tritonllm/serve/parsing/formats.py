"""The formats in which models write calls and thoughts, by the names of vLLM's parsers, and how templates show them."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from tritonllm.serve.parsing.markup import GLM45, MINIMAX_M2, QWEN3_CODER, SEED_OSS, Markup, markup
from tritonllm.serve.parsing.pieces import AnswerReader
from tritonllm.serve.parsing.python_calls import pythonic, tagged_calls
from tritonllm.serve.parsing.reasoning import Thoughts, harmony
from tritonllm.serve.parsing.source import PieceSource, SourceReader, Steps
from tritonllm.serve.parsing.tools import DEEPSEEK, KIMI_K2, CallSection, llama3_json, mistral, section, tagged

CHANNEL = "<|channel|>"  # of the format that holds thoughts and calls, openai's


@dataclass(frozen=True)
class ToolParser:
    """A format of calls.

    Args:
        new: makes a reader of one answer from the tools that may be called: their names, or a mapping of these to what
            the request says of each function.
        markers: texts of which the format consists. The token of such a text is a special one in some vocabularies,
            and must not be left out.
    """

    new: Callable[[Collection[str]], AnswerReader]
    markers: tuple[str, ...] = ()


def _alike(body: Callable[..., Steps[None]], *args: object, markers: Iterable[str] = ()) -> ToolParser:
    """A format that is read in the same way whatever the tools are."""
    return ToolParser(lambda tools: SourceReader(body, *args), tuple(markers))


def _of_tags(*tags: tuple[str, str]) -> ToolParser:
    return _alike(tagged, *tags, markers=[text for pair in tags for text in pair if text])


def _of_section(form: CallSection) -> ToolParser:
    return _alike(section, form, markers=[*form.section, *form.call, form.separator])


def _for_tools(body: Callable[..., Steps[None]], *args: object, markers: Iterable[str] = ()) -> ToolParser:
    """A format of which the tools decide what a call is, or what type an argument has."""

    def steps(text: PieceSource, tools: Collection[str]) -> Steps[None]:
        return body(text, tools, *args)

    return ToolParser(lambda tools: SourceReader(steps, tools), tuple(markers))


def _of_markup(form: Markup) -> ToolParser:
    parts = [*form.block, *form.function, *form.key, *form.value]
    return _for_tools(markup, form, markers=[part for part in parts if len(part) > 2])


_PYTHON = ("<|python_start|>", "<|python_end|>")
_LLAMA3 = _for_tools(llama3_json, "<|python_tag|>", *_PYTHON, markers=["<|python_tag|>", *_PYTHON])
_DEEPSEEK, _QWEN3_CODER, _GLM45 = _of_section(DEEPSEEK), _of_markup(QWEN3_CODER), _of_markup(GLM45)
_HERMES = _of_tags(("<tool_call>", "</tool_call>"))
TOOL_PARSERS = {
    "hermes": _HERMES,
    "llama3_json": _LLAMA3,
    "llama4_json": _LLAMA3,
    "mistral": _alike(mistral, markers=["[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"]),
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v31": _DEEPSEEK,
    "openai": _alike(harmony, markers=[CHANNEL]),
    "qwen3_coder": _QWEN3_CODER,
    "qwen3_xml": _QWEN3_CODER,
    "glm45": _GLM45,
    "glm47": _GLM45,
    "seed_oss": _of_markup(SEED_OSS),
    "minimax_m2": _of_markup(MINIMAX_M2),
    "hunyuan_a13b": _of_tags(("<tool_calls>", "</tool_calls>")),
    "granite": _of_tags(("<|tool_call|>", ""), ("<tool_call>", ""), ("<function_call>", "")),
    "granite4": _HERMES,
    "ernie45": _HERMES,
    "phi4_mini_json": _of_tags(("functools", ""), ("<|tool_call|>", "<|/tool_call|>")),
    "kimi_k2": _of_section(KIMI_K2),
    "pythonic": _for_tools(pythonic, "", ""),
    "llama4_pythonic": _for_tools(pythonic, *_PYTHON, markers=_PYTHON),
    "olmo3": _alike(tagged_calls, "<function_calls>", "</function_calls>", markers=["<function_calls>"]),
}

_THINK = Thoughts()
_THINKS = Thoughts(begins=True)
REASONING_PARSERS: dict[str, Thoughts | None] = {  # None: in channels
    "qwen3": _THINK,
    "deepseek_r1": _THINKS,
    "deepseek_v3": _THINK,
    "openai_gptoss": None,
    "glm45": _THINK,
    "seed_oss": Thoughts("<seed:think>", "</seed:think>", opened=("<seed:think><seed:cot_budget_reflect>",)),
    "hunyuan_a13b": Thoughts(around=("<answer>", "</answer>")),
    "granite": Thoughts("Here is my thought process:", "Here is my response:"),
    "ernie45": Thoughts(begins=True, around=("<response>", "</response>")),
    "olmo3": _THINK,
    "minimax_m2": _THINKS,
    "kimi_k2": Thoughts(calls=(KIMI_K2.section[0],)),
    "mistral": Thoughts("[THINK]", "[/THINK]"),
}


@dataclass(frozen=True)
class Shown:
    """How a chat template shows a format.

    Args:
        name: the parser's name.
        all_of: texts that the template has, all of them.
        none_of: texts that it has none of.
    """

    name: str
    all_of: tuple[str, ...]
    none_of: tuple[str, ...] = ()

    def fits(self, template: str) -> bool:
        return all(text in template for text in self.all_of) and not any(text in template for text in self.none_of)


# The first that fits counts: what is one family's own stands before what several have.
SHOWN_TOOLS = (
    Shown("openai", (CHANNEL,)),
    Shown("mistral", ("[TOOL_CALLS]",)),
    Shown("deepseek_v3", (DEEPSEEK.section[0],)),
    Shown("kimi_k2", (KIMI_K2.section[0],)),
    Shown("kimi_k2", ("<|im_middle|>", "tool_declare")),
    Shown("minimax_m2", (MINIMAX_M2.block[0],)),
    Shown("seed_oss", (SEED_OSS.block[0],)),
    Shown("glm45", ("<arg_key>", "<arg_value>")),
    Shown("qwen3_coder", ("<tool_call>", "<function=", "<parameter=")),
    Shown("hunyuan_a13b", ("<tool_calls>", '"arguments"')),
    Shown("olmo3", ("<function_calls>",)),
    Shown("phi4_mini_json", ("functools[",)),
    Shown("phi4_mini_json", ("<|tool|>", "<|/tool|>")),
    Shown("granite", ("<|tool_call|>", "<|start_of_role|>")),
    Shown("hermes", ("<tool_call>", "arguments"), none_of=("<function=",)),
    Shown("llama4_pythonic", ("<|header_start|>", "[func_name1(")),
    Shown("pythonic", ("[func_name1(",)),
    Shown("llama4_json", ("<|header_start|>", '"parameters": ')),
    Shown("llama3_json", ("<|start_header_id|>", '"parameters": ')),
)
SHOWN_THOUGHTS = (
    Shown("openai_gptoss", (CHANNEL,)),
    Shown("seed_oss", ("<seed:think>",)),
    Shown("mistral", ("[THINK]", "[/THINK]")),
    Shown("kimi_k2", ("</think>", KIMI_K2.section[0])),
    Shown("minimax_m2", ("</think>", MINIMAX_M2.block[0])),
    Shown("glm45", ("</think>", "<arg_key>")),
    Shown("hunyuan_a13b", ("</think>", "<answer>", "</answer>")),
    Shown("ernie45", ("</think>", "<response>", "</response>"), none_of=("<|start_of_role|>",)),
    Shown("granite", ("Here is my thought process:", "Here is my response:")),
    Shown("qwen3", ("</think>",)),
)
