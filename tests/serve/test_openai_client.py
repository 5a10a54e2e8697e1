"""The official client against the server: what it gets is what the offline engine computes."""

import asyncio
import json
import runpy

import openai
import pytest
from support.server import MODEL, ROOT, eventually
from support.waiting import PATIENCE

from tritonllm import SamplingParams

CONVERSATION = [{"role": "user", "content": "What is 47 + 66?"}]
STORY = "There was a fox named"


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def completion(llm, prompt=STORY, **params):
    (output,) = llm.generate([prompt], SamplingParams(**params), use_tqdm=False)
    return output.outputs


def test_models(client):
    names = [model.id for model in client.models.list()]
    assert names == [MODEL, "other-name"]
    assert client.models.retrieve("other-name").id == "other-name"


def test_completion(client, llm):
    reply = client.completions.create(model=MODEL, prompt=STORY, max_tokens=12, temperature=0)
    (expected,) = completion(llm, max_tokens=12, temperature=0)
    assert reply.choices[0].text == expected.text
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage.completion_tokens == 12
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + 12


def test_several_prompts_and_continuations_are_in_order(client, llm):
    prompts = [STORY, "47 + 38 =", "The fox"]
    params = {"max_tokens": 8, "n": 2, "seed": 5, "temperature": 1.0}
    reply = client.completions.create(model=MODEL, prompt=prompts, **params)
    expected = [part.text for prompt in prompts for part in completion(llm, prompt, **params)]
    assert [choice.index for choice in reply.choices] == list(range(6))
    assert [choice.text for choice in reply.choices] == expected


def test_token_ids_as_prompt(client, llm):
    ids = llm.get_tokenizer().encode(STORY)
    reply = client.completions.create(
        model=MODEL, prompt=ids, max_tokens=8, temperature=0, extra_body={"return_token_ids": True}
    )
    (expected,) = completion(llm, max_tokens=8, temperature=0)
    assert reply.choices[0].token_ids == expected.token_ids


def test_extra_sampling_fields(client, llm):
    more = {"top_k": 20, "min_p": 0.01, "repetition_penalty": 1.2, "min_tokens": 6, "ignore_eos": True}
    common = {"max_tokens": 16, "seed": 3, "temperature": 1.3, "top_p": 0.9, "stop": ["the", "a"]}
    reply = client.completions.create(model=MODEL, prompt=STORY, **common, extra_body=more)
    (expected,) = completion(llm, **common, **more)
    assert (reply.choices[0].text, reply.choices[0].finish_reason) == (expected.text, expected.finish_reason)
    assert reply.choices[0].stop_reason == expected.stop_reason


def test_logprobs_and_echo_of_a_completion(client, llm):
    reply = client.completions.create(model=MODEL, prompt=STORY, max_tokens=5, temperature=0, logprobs=2, echo=True)
    (expected,) = completion(llm, max_tokens=5, temperature=0, logprobs=2)
    scores = reply.choices[0].logprobs
    prompt_tokens = reply.usage.prompt_tokens
    chosen = [position[token].logprob for token, position in zip(expected.token_ids, expected.logprobs, strict=True)]
    assert reply.choices[0].text == STORY + expected.text
    assert scores.token_logprobs[0] is None
    assert scores.token_logprobs[prompt_tokens:] == pytest.approx(chosen, abs=1e-4)
    assert "".join(scores.tokens) == STORY + expected.text
    assert scores.text_offset == [sum(map(len, scores.tokens[:i])) for i in range(len(scores.tokens))]
    assert all(len(top) >= 2 for top in scores.top_logprobs[1:])


def test_tokens_that_are_part_of_a_character(client, llm):
    text = "a \u00e9\U0001f389x"
    ask = {"model": MODEL, "temperature": 0, "max_tokens": 20}
    more = {"extra_body": {"structured_outputs": {"choice": [text]}}}
    scores = client.completions.create(**ask, **more, prompt=STORY, logprobs=1, echo=True).choices[0].logprobs
    tokens = [token for token in llm.get_tokenizer().encode(text) if token != 0]
    begins = [len(bytes_so_far.decode(errors="ignore")) for bytes_so_far in _beginnings(text, tokens, llm)]
    assert len(tokens) > len(text) - 1 and scores.text_offset[-1] == len(STORY + text)  # of the end of sequence
    assert scores.text_offset[-1 - len(tokens) : -1] == [len(STORY) + begin for begin in begins]
    streamed = client.completions.create(**ask, **more, prompt=STORY, logprobs=1, stream=True)
    parts = [chunk.choices[0].logprobs for chunk in streamed]
    assert [offset for part in parts for offset in part.text_offset] == [*begins, len(text)]
    choice = client.chat.completions.create(**ask, **more, messages=CONVERSATION, logprobs=True).choices[0]
    entries = choice.logprobs.content[: len(tokens)]
    assert b"".join(bytes(entry.bytes) for entry in entries) == text.encode() == choice.message.content.encode()


def _beginnings(text, tokens, llm):
    """The bytes before each token of a text that a byte-level tokenizer has made them of."""
    lengths = [len(name) for name in llm.get_tokenizer().convert_ids_to_tokens(tokens)]
    return [text.encode()[: sum(lengths[:index])] for index in range(len(tokens))]


def test_prompt_ids_come_with_the_first_chunk_of_a_stream(client, llm):
    ask = {"model": MODEL, "temperature": 0, "max_tokens": 4, "n": 2, "stream": True}
    ids = llm.get_tokenizer().encode(STORY)
    for echo in (False, True):
        chunks = client.completions.create(**ask, prompt=STORY, echo=echo, extra_body={"return_token_ids": True})
        seen = {0: [], 1: []}
        for chunk in chunks:
            (choice,) = chunk.choices
            seen[choice.index].append(choice.prompt_token_ids)
        for first, *others in seen.values():
            assert first == ids and others and not any(others)
    first, *others = client.chat.completions.create(**ask, messages=CONVERSATION, extra_body={"return_token_ids": True})
    (output,) = llm.chat(CONVERSATION, SamplingParams(max_tokens=1), use_tqdm=False)
    assert first.prompt_token_ids == list(output.prompt_token_ids)
    assert not any(hasattr(chunk, "prompt_token_ids") for chunk in others)


def test_the_prompt_alone_can_be_scored(client):
    """With max_tokens=0, as programs that evaluate models ask."""
    longer = client.completions.create(model=MODEL, prompt=STORY, max_tokens=2, temperature=0, logprobs=2, echo=True)
    reply = client.completions.create(model=MODEL, prompt=STORY, max_tokens=0, temperature=0, logprobs=2, echo=True)
    count, scores = reply.usage.prompt_tokens, reply.choices[0].logprobs
    assert (reply.choices[0].text, reply.choices[0].finish_reason) == (STORY, "length")
    assert (reply.usage.completion_tokens, reply.usage.total_tokens) == (0, count)
    assert len(scores.tokens) == len(scores.top_logprobs) == count
    assert scores.token_logprobs[1:] == pytest.approx(longer.choices[0].logprobs.token_logprobs[1:count], abs=1e-4)
    (last,) = client.completions.create(model=MODEL, prompt=STORY, max_tokens=0, echo=True, stream=True)
    assert (last.choices[0].text, last.choices[0].finish_reason) == (STORY, "length")
    with pytest.raises(openai.BadRequestError, match="or 0 with echo=true"):
        client.completions.create(model=MODEL, prompt=STORY, max_tokens=0)


def test_streamed_completion_is_the_whole_one(client, llm):
    params = {"max_tokens": 16, "n": 2, "seed": 9, "temperature": 1.0}
    texts, ends, usage = ["", ""], [None, None], None
    stream = client.completions.create(
        model=MODEL, prompt=STORY, stream=True, stream_options={"include_usage": True}, **params
    )
    for chunk in stream:
        for choice in chunk.choices:
            assert ends[choice.index] is None, "nothing comes after the end"
            texts[choice.index] += choice.text
            ends[choice.index] = choice.finish_reason
        assert "usage" in chunk.model_fields_set and (chunk.usage is None) == bool(chunk.choices)
        usage = chunk.usage or usage
    expected = completion(llm, **params)
    assert texts == [part.text for part in expected]
    assert ends == [part.finish_reason for part in expected]
    assert usage.completion_tokens == sum(len(part.token_ids) for part in expected)


def test_chat(client, llm):
    reply = client.chat.completions.create(
        model=MODEL, messages=CONVERSATION, temperature=0, logprobs=True, top_logprobs=3, max_completion_tokens=30
    )
    (output,) = llm.chat(CONVERSATION, SamplingParams(temperature=0, max_tokens=30, logprobs=3), use_tqdm=False)
    expected = output.outputs[0]
    choice = reply.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", expected.text)
    assert choice.finish_reason == expected.finish_reason == "stop"
    assert reply.usage.prompt_tokens == len(output.prompt_token_ids)
    assert len(choice.logprobs.content) == len(expected.token_ids)
    assert [len(entry.top_logprobs) for entry in choice.logprobs.content] == [3] * len(expected.token_ids)
    assert all(entry.top_logprobs[0].logprob == entry.logprob for entry in choice.logprobs.content)  # greedy


def test_streamed_chat_is_the_whole_one(client):
    params = {"model": MODEL, "messages": CONVERSATION, "temperature": 0}
    whole = client.chat.completions.create(**params)
    chunks = list(client.chat.completions.create(**params, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1] == "stop"
    assert all("usage" in chunk.model_fields_set and chunk.usage is None for chunk in chunks[:-1])
    without = client.chat.completions.create(**params, stream=True)
    assert not any("usage" in chunk.model_fields_set for chunk in without)
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len({chunk.id for chunk in chunks}) == 1


def test_async_client(server, llm):
    async def ask():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            stream = await client.completions.create(
                model=MODEL, prompt=STORY, max_tokens=12, temperature=0, stream=True
            )
            return "".join([chunk.choices[0].text async for chunk in stream])

    (expected,) = completion(llm, max_tokens=12, temperature=0)
    assert asyncio.run(ask()) == expected.text


def test_streams_are_not_mixed_up(server, llm):
    """64 at once, every one with a prompt and a length of its own."""
    prompts = [f"{i} + {100 - i} =" for i in range(64)]

    async def one(client, index):
        stream = await client.completions.create(
            model=MODEL,
            prompt=prompts[index],
            max_tokens=4 + index % 7,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        return [token async for chunk in stream for token in chunk.choices[0].token_ids]

    async def ask():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=PATIENCE) as client:
            return await asyncio.gather(*(one(client, index) for index in range(64)))

    params = [SamplingParams(temperature=0, max_tokens=4 + i % 7, ignore_eos=True) for i in range(64)]
    expected = [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]
    assert asyncio.run(ask()) == expected
    eventually(server.is_idle)


def test_a_template_without_tools_can_be_asked_for_a_call(client):
    """It shows the model no tools, but a grammar holds the answer to a call."""
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
    ask = {"model": MODEL, "messages": CONVERSATION, "tools": tools, "max_tokens": 60}
    assert client.chat.completions.create(**ask, tool_choice="auto").choices[0].message.tool_calls is None
    assert client.chat.completions.create(**ask, tool_choice="required").choices[0].message.tool_calls


def test_errors_are_the_clients_own(client):
    with pytest.raises(openai.NotFoundError, match="'gpt-9' is not served") as caught:
        client.completions.create(model="gpt-9", prompt=STORY)
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="temperature must be"):
        client.completions.create(model=MODEL, prompt=STORY, temperature=-1)


def test_the_example(server, capsys):
    example = runpy.run_path(str(ROOT / "examples" / "openai_client.py"))
    example["main"](f"{server.url}/v1")
    sum_line, story = capsys.readouterr().out.split("\n", 1)
    assert "113" in sum_line
    assert story.strip()


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def test_a_schema_and_a_choice(client):
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    reply = client.chat.completions.create(
        model=MODEL, messages=CONVERSATION, response_format=form, max_tokens=120, temperature=0, seed=1
    )
    answer = json.loads(reply.choices[0].message.content)
    assert (
        answer.keys() == {"name", "age"} and isinstance(answer["age"], int) and reply.choices[0].finish_reason == "stop"
    )
    chosen = client.completions.create(
        model=MODEL, prompt=STORY, max_tokens=9, extra_body={"structured_outputs": {"choice": [" Ann", " Bob"]}}
    )
    assert chosen.choices[0].text in (" Ann", " Bob")
