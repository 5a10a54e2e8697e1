import pytest
from support.ports import reserved_port
from support.server import running_server

from tritonllm import LLM
from tritonllm.demo import model_path

# Shows messages and tools as JSON, and tells how calls and thoughts are written. A message of the user is as in the
# model's own template, which it has learned.
TEMPLATE = """\
{#- <tool_call>{"name": ..., "arguments": ...}</tool_call>, <think>...</think> -#}
{%- if tools %}{{ tools | tojson }}{% endif -%}
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'user' %}{{ m.content }}{% else %}{{ m | tojson }}{% endif %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if think %}<think>
{% endif %}{% endif -%}"""


@pytest.fixture(scope="package")
def server():
    """One for the tests that leave it as they found it."""
    with running_server("--max-body-bytes", "100000") as running:
        yield running


@pytest.fixture(scope="package")
def tools_server(tmp_path_factory):
    """One whose template knows tools and thoughts."""
    template = tmp_path_factory.mktemp("template") / "tools.jinja"
    template.write_text(TEMPLATE)
    with running_server("--chat-template", str(template), "--enable-auto-tool-choice") as running:
        yield running


@pytest.fixture(scope="package")
def llm():
    """The same model offline."""
    return LLM(str(model_path()))


@pytest.fixture(scope="module")
def free_port():
    """Of this machine, where nobody listens yet."""
    with reserved_port() as port:
        yield port
