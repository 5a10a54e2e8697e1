import inspect

import pytest
from support.tiny_tokenizer import save_tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from tritonllm.engine.text.chat import ChatOptions, render
from tritonllm.engine.text.tokenizer import render_template

USER = {"role": "user", "content": "the cat"}
DEEP: list = []
for _ in range(5000):
    DEEP = [DEEP]
SHOW = (
    "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
    "{% for t in tools or [] %}<{{ t.function.name }}>{% endfor %}{% if enable_thinking is false %}<think/>{% endif %}"
    "{% if add_generation_prompt %}>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


def text(tokenizer, *messages, template=SHOW, **options):
    return render(tokenizer, list(messages), ChatOptions(chat_template=template, **options))["prompt"]


def test_variables_reach_the_template(tokenizer):
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    assert text(tokenizer, USER) == "[user:the cat]>"
    assert text(tokenizer, USER, add_generation_prompt=False) == "[user:the cat]"
    assert text(tokenizer, USER, tools=tools, chat_template_kwargs={"enable_thinking": False}) == (
        "[user:the cat]<weather><think/>>"
    )


@pytest.mark.parametrize("name", ["tools", "add_generation_prompt", "continue_final_message", "chat_template"])
def test_a_variable_that_is_an_argument_is_refused(name):
    """Its value would be overwritten."""
    with pytest.raises(ValueError, match=f"^chat_template_kwargs has '{name}': give {name} beside it instead"):
        ChatOptions(chat_template_kwargs={"enable_thinking": False, name: None})


def test_variables_that_no_template_can_have_are_refused(tokenizer):
    """All that gets in the way of what the tokenizer is told; whatever else a template may be given."""
    told = {
        *inspect.signature(render_template).parameters,
        *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters,
        *inspect.signature(render_jinja_template).parameters,
        "messages",
    }
    for name in told - {"kwargs", "options"}:
        try:
            options = ChatOptions(chat_template=SHOW, chat_template_kwargs={name: []})
        except ValueError as error:
            assert str(error).startswith(f"chat_template_kwargs has '{name}'")
        else:
            assert render(tokenizer, [USER], options)["prompt"] == "[user:the cat]>"


def test_a_template_that_joins_texts_may_be_given_none(tokenizer):
    """The message of a client that says nothing but a call; other templates see what there is."""
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    joins = "{% for m in messages %}{{ '<' + m.role + ':' + m.content + '>' }}{% endfor %}"
    for message in (call, {key: value for key, value in call.items() if key != "content"}):
        assert text(tokenizer, USER, message, template=joins) == "<user:the cat><assistant:>"
        assert text(tokenizer, message, template="{{ messages[0].content is string }}") == "False"


STRICT = (  # as Mistral's and Gemma's
    "{% if messages[0].role == 'system' %}({{ messages[0].content }}){% set turns = messages[1:] %}"
    "{% else %}{% set turns = messages %}{% endif %}"
    "{% for m in turns %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) or m.role == 'system' %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
)


def test_a_template_whose_turns_alternate_takes_any_order_of_roles(tokenizer):
    """Clients remind the model in the system's name wherever they like."""
    said = {"role": "assistant", "content": "sat"}
    system, late = {"role": "developer", "content": "be brief"}, {"role": "system", "content": "it rains"}
    assert text(tokenizer, system, late, USER, template=STRICT) == "(be brief\n\nit rains)[user:the cat]"
    assert text(tokenizer, USER, late, template=STRICT) == "[user:the cat\n\nit rains]"
    expected = "(it rains)[user:the cat][assistant:sat][user:it rains\n\nthe cat]"
    assert text(tokenizer, late, USER, said, late, USER, template=STRICT) == expected
    assert text(tokenizer, USER, late) == "[user:the cat][system:it rains]>", "as it is, where the template takes it"
    tool = {"role": "tool", "content": "x"}
    with pytest.raises(ValueError, match="roles must alternate"):
        text(tokenizer, USER, tool, tool, template=STRICT)


def test_the_last_message_is_continued(tokenizer):
    last = {"role": "assistant", "content": "It is"}
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert text(tokenizer, USER, last, template=None, **options).endswith("<|im_start|>assistant\nIt is")


def test_parts_of_text_are_joined(tokenizer):
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}, "c"]
    assert text(tokenizer, {"role": "user", "content": parts}) == "[user:a\nb\nc]>"
    assert text(tokenizer, {"role": "user", "content": parts}, chat_template_content_format="string").startswith(
        "[user"
    )


def test_arguments_of_a_call_are_decoded(tokenizer):
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": 3}'}}
    template = "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.arguments.x }}{% endfor %}{% endfor %}"
    assert text(tokenizer, {"role": "assistant", "content": None, "tool_calls": [call]}, template=template) == "3"
    assert call["function"]["arguments"] == '{"x": 3}'


@pytest.mark.parametrize("arguments", ['{"a": ', "", "[1]", "nine", '{"a": 1}'])
def test_arguments_that_are_no_object_do_not_end_a_conversation(tokenizer, arguments):
    """A client sends back what the model has written, and what came of it."""
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    shows = "{% for m in messages %}{{ m.tool_calls[0].function.arguments }}{% endfor %}"
    value = {"": "{}", '{"a": 1}': "{'a': 1}"}.get(arguments, arguments)
    assert text(tokenizer, call, template=shows) == value
    goes_through = "{% for k, v in messages[0].tool_calls[0].function.arguments.items() %}{{ k }}={{ v }}{% endfor %}"
    assert text(tokenizer, call, template=goes_through) == ("a=1" if arguments == '{"a": 1}' else "")


@pytest.mark.parametrize(
    ("message", "options", "complaint"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, {}, "type 'image_url'"),
        ({"role": "user", "content": [{"type": "text"}]}, {}, "it must be a string"),
        ({"role": "user", "content": [3]}, {}, "type 'int'"),
        ({"role": "user", "content": 3}, {}, r"messages\[0\]\['content'\] must be text"),
        (USER, {"template": "{% for %}"}, "chat template is not valid Jinja"),
        (USER, {"template": "{{ raise_exception('only assistants') }}"}, "only assistants"),
        (
            USER,
            {"template": "{{ messages[0].content + 1 }}"},
            "these messages: can only concatenate",
        ),
        (USER, {"template": "{{ messages[0].a.b.c }}"}, "chat template cannot render these messages"),
        (USER, {"continue_final_message": True}, "add_generation_prompt=False"),
        (USER, {"chat_template_content_format": "openai"}, "chat_template_content_format must be"),
        (USER, {"tools": "weather"}, "tools must be a list"),
        (USER, {"chat_template_kwargs": [1]}, "chat_template_kwargs must be a dict"),
        (USER, {"chat_template_kwargs": {3: 4}}, "chat_template_kwargs must have strings as keys, got 3"),
        (USER, {"mm_processor_kwargs": {"a": 1}}, "mm_processor_kwargs"),
        ({"content": "a"}, {}, "messages must be dicts"),
        ({"role": "user", "content": "a", "more": DEEP}, {}, "nested too deep"),
        ({"role": "assistant", "tool_calls": [{"function": {"arguments": "[" * 90_000}}]}, {}, "nested too deep"),
        ({"role": 3, "content": "a"}, {}, r"messages\[0\]\['role'\] must be a string, got 3"),
        ({"role": "assistant", "tool_calls": True}, {}, r"messages\[0\]\['tool_calls'\] must be a list of calls"),
    ],
)
def test_errors(tokenizer, message, options, complaint):
    with pytest.raises(ValueError, match=complaint):
        text(tokenizer, message, **options)
