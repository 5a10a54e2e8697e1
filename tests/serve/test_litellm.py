r"""LiteLLM, as its users call it.

It runs where LiteLLM is installed. LiteLLM is not in the extra `dev`: it takes 190 MB on the disk, and with it all of
`dev` would get an older huggingface_hub (below 2). What is tested here runs with the newer one. This puts it there:

    pip install --no-deps litellm pydantic-settings python-dotenv fastuuid "importlib-metadata<9" zipp h2 hpack \
        hyperframe
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
