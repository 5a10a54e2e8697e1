"""LiteLLM, as its users call it.

It runs where LiteLLM is installed (`pip install litellm`). LiteLLM is not in the extra `dev`: it takes 200 MB on the
disk, and brings boto3. Its pins change none of the packages of `dev` (1.110.2 takes huggingface_hub 2).
"""

import os

import pytest
from support.server import MODEL

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would ask the network for prices when it is imported
litellm = pytest.importorskip("litellm", reason="LiteLLM is not installed: see the top of this file")

ASK = "What is 47 + 66?"


def expected(server):
    body = {"model": MODEL, "messages": [{"role": "user", "content": ASK}], "temperature": 0, "max_tokens": 20}
    return server.client.post("/v1/chat/completions", json=body).json()


def complete(server, **more):
    """As the documentation of LiteLLM has it for servers with OpenAI's API."""
    settings = {"model": f"openai/{MODEL}", "api_base": f"{server.url}/v1", "api_key": "none", "temperature": 0}
    return litellm.completion(messages=[{"role": "user", "content": ASK}], **{**settings, "max_tokens": 20, **more})


def test_litellm(server):
    answer = expected(server)
    found = complete(server)
    assert found.choices[0].message.content == answer["choices"][0]["message"]["content"]
    assert found.usage.completion_tokens == answer["usage"]["completion_tokens"]
    parts = [chunk.choices[0].delta.content or "" for chunk in complete(server, stream=True)]
    assert "".join(parts) == found.choices[0].message.content
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        complete(server, temperature=-1)
