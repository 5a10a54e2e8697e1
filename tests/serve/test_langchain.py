"""LangChain, as its users call it."""

import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from support.server import MODEL

ASK = "What is 47 + 66?"
TEXT = 'It is simple. <tool_call>{"name": "add", "arguments": {"a": 47, "b": 66}}</tool_call>'


@tool
def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


@tool
def greet(loud: bool) -> str:
    """Greets."""
    return "HELLO" if loud else "hello"


def chat(server, **more):
    """As the documentation of LangChain has it for servers with OpenAI's API."""
    settings = {"model": MODEL, "base_url": f"{server.url}/v1", "api_key": "none", "temperature": 0, "max_tokens": 20}
    return ChatOpenAI(**{**settings, **more})


def expected(server, **more):
    body = {"model": MODEL, "messages": [{"role": "user", "content": ASK}], "temperature": 0, "max_tokens": 20}
    return server.client.post("/v1/chat/completions", json={**body, **more}).json()


def test_langchain(server):
    model, answer = chat(server), expected(server)
    found = model.invoke(ASK)
    assert found.content == answer["choices"][0]["message"]["content"]
    assert found.response_metadata["finish_reason"] == answer["choices"][0]["finish_reason"]
    assert found.usage_metadata["output_tokens"] == answer["usage"]["completion_tokens"]
    assert "".join(chunk.content for chunk in model.stream(ASK)) == found.content
    several = model.batch([ASK, [HumanMessage("Hello")]])
    assert several[0].content == found.content and several[1].content


def test_langchains_tools(tools_server):
    """The model is made to write a call; then the result goes back."""
    model = chat(tools_server, max_tokens=400, extra_body={"structured_outputs": {"choice": [TEXT]}})
    messages = [HumanMessage(ASK)]
    found = model.bind_tools([add]).invoke(messages)
    (call,) = found.tool_calls
    assert (call["name"], call["args"]) == ("add", {"a": 47, "b": 66})
    messages += [found, ToolMessage(str(add.invoke(call["args"])), tool_call_id=call["id"])]
    assert isinstance(chat(tools_server).bind_tools([add]).invoke(messages), AIMessage)
    forced = chat(tools_server, max_tokens=100).bind_tools([add, greet], tool_choice="greet").invoke(ASK)
    assert [(call["name"], set(call["args"])) for call in forced.tool_calls] == [("greet", {"loud"})]


def test_langchains_structured_output(tools_server):
    schema = {"title": "greet", "description": "Greets.", "type": "object", "properties": {"loud": {"type": "boolean"}}}
    schema |= {"required": ["loud"], "additionalProperties": False}
    for method in ("json_schema", "function_calling"):
        model = chat(tools_server, max_tokens=100).with_structured_output(schema, method=method)
        assert isinstance(model.invoke("Hello")["loud"], bool), method


def test_langchains_embeddings(server):
    model = OpenAIEmbeddings(model=MODEL, base_url=f"{server.url}/v1", api_key="none", check_embedding_ctx_length=False)
    one, two = model.embed_documents(["a fox", "a ball"])
    assert len(one) == len(two) and one != two
    assert model.embed_query("a fox") == pytest.approx(one, abs=1e-5)
