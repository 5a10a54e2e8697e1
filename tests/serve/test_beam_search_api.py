"""``use_beam_search`` and ``length_penalty`` over HTTP: the search of ``LLM.beam_search``."""

import asyncio

import pytest
from support.engines import tiny_checkpoint
from support.imported_processes import imported_processes
from support.server import MODEL, eventually

from tritonllm import AsyncEngineArgs, AsyncLLM, BeamSearchParams, SamplingParams

PROMPT = "There was a fox named"
BODY = {"model": MODEL, "use_beam_search": True, "max_tokens": 12, "n": 4}


def beams(llm, prompt, **more):
    """Texts and tokens of the continuations, the best first."""
    (output,) = llm.beam_search([prompt], BeamSearchParams(4, 12, **more))
    length = len(llm.get_tokenizer()(prompt)["input_ids"])
    return [sequence.tokens[length:] for sequence in output.sequences]


def choices(server, path="completions", **more):
    reply = server.client.post(f"/v1/{path}", json={**BODY, **more})
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"]


@pytest.mark.parametrize("length_penalty", [1.0, -4.0])
@pytest.mark.parametrize("ignore_eos", [True, False])
def test_completions(server, llm, length_penalty, ignore_eos):
    wish = {"length_penalty": length_penalty, "ignore_eos": ignore_eos}
    found = choices(server, prompt=PROMPT, return_token_ids=True, **wish)
    assert [choice["index"] for choice in found] == [0, 1, 2, 3]
    assert [choice["token_ids"] for choice in found] == beams(llm, PROMPT, **wish)
    assert all(choice["text"] for choice in found)
    eventually(server.is_idle)


def test_several_prompts_with_logprobs(server, llm):
    prompts = [PROMPT, "Tom and Mia"]
    found = choices(server, prompt=prompts, logprobs=2, return_token_ids=True)
    assert len(found) == 8
    for number, prompt in enumerate(prompts):
        mine = found[4 * number : 4 * number + 4]
        assert [choice["token_ids"] for choice in mine] == beams(llm, prompt)
    scores = found[0]["logprobs"]
    assert len(scores["tokens"]) == len(found[0]["token_ids"])
    assert all(2 <= len(position) <= 3 for position in scores["top_logprobs"])
    sums = [sum(choice["logprobs"]["token_logprobs"]) / len(choice["token_ids"]) for choice in found[:4]]
    assert sums == sorted(sums, reverse=True), "the best comes first"


def test_chat(server, llm):
    messages = [{"role": "user", "content": "What is 47 + 66?"}]
    found = choices(server, "chat/completions", messages=messages)
    prompt = llm.get_tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    (output,) = llm.beam_search([prompt], BeamSearchParams(4, 12))
    tokenizer, length = llm.get_tokenizer(), len(llm.get_tokenizer()(prompt)["input_ids"])
    expected = [tokenizer.decode(s.tokens[length:], skip_special_tokens=True) for s in output.sequences]
    assert [choice["message"]["content"] for choice in found] == expected
    single = choices(server, "chat/completions", messages=messages, n=1)
    greedy = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)[0].outputs[0]
    assert [choice["message"]["content"] for choice in single] == [greedy.text]
    eventually(server.is_idle)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"stream": True}, "use_beam_search cannot be streamed"),
        ({"top_p": 0.5}, "top_p: a beam search does not follow it"),
        ({"stop": ["x"]}, "stop: a beam search"),
        ({"response_format": {"type": "json_object"}}, "response_format: a beam search"),
        ({"temperature": 0.7}, "temperature must be 0 or 1"),
        ({"use_beam_search": False, "length_penalty": 2.0}, "add use_beam_search=true"),
        ({"length_penalty": "x"}, "length_penalty"),
        ({"length_penalty": 5000}, "length_penalty must be a number from -32 to 32"),
        ({"max_tokens": 0}, "max_tokens must be"),
        ({"logprobs": 21}, "logprobs=21 is more than max_logprobs=20"),
    ],
)
def test_mistakes(server, more, message):
    reply = server.client.post("/v1/completions", json={**BODY, "prompt": PROMPT, **more})
    assert reply.status_code == 400
    assert message in reply.json()["error"]["message"]


def test_neutral_values_are_welcome(server):
    wish = {"top_p": 1.0, "temperature": 1.0, "frequency_penalty": 0.0, "response_format": {"type": "text"}}
    assert choices(server, prompt=PROMPT, **wish) == choices(server, prompt=PROMPT)
    assert choices(server, prompt=PROMPT, use_beam_search=False, length_penalty=1.0, n=1)


def test_a_search_that_nobody_waits_for_is_aborted():
    async def follow(llm):
        with pytest.raises(ValueError, match="params must be BeamSearchParams"):
            await anext(llm.beam_search([5, 6], SamplingParams(), "x"))
        with pytest.raises(ValueError, match="beam_width=8 needs max_num_seqs"):
            await anext(llm.beam_search([5, 6], BeamSearchParams(8, 4), "x"))
        task = asyncio.create_task(anext(llm.beam_search([5, 6], BeamSearchParams(4, 100), "x")))
        while not llm.stats.num_running:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while llm.stats.num_running or llm.stats.num_free_blocks != llm.stats.num_blocks:
            await asyncio.sleep(0.01)
        assert llm.num_unfinished == 0
        output = await anext(llm.beam_search([5, 6], BeamSearchParams(2, 4), "x"))
        assert len(output.outputs) == 2 and llm.num_unfinished == 0

    with asyncio.Runner() as runner:
        settings = {"block_size": 4, "num_gpu_blocks_override": 256, "max_num_seqs": 4, "max_num_batched_tokens": 64}
        with imported_processes():
            llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(tiny_checkpoint()), **settings))
        try:
            runner.run(follow(llm))
        finally:
            llm.shutdown()
