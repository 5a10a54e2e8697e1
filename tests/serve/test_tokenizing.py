"""Long texts are tokenized beside short ones."""

import asyncio
import threading

import pytest
from support.server import MODEL
from support.waiting import PATIENCE

from tritonllm.config.pooling_params import PoolingParams
from tritonllm.config.sampling_params import SamplingParams
from tritonllm.engine.text.input_processor import SURELY_QUICK, InputProcessor
from tritonllm.serve.engines.tokenizing import Tokenizing, characters

LONG = "x" * (SURELY_QUICK + 1)


class Tokenizer:
    """A token for each character. Long texts wait until ``go`` is set."""

    def __init__(self, go, calls, *, copies=True):
        self.go, self.calls, self.copies = go, calls, copies

    def __deepcopy__(self, memo):
        if not self.copies:
            raise TypeError("cannot pickle it")
        return Tokenizer(self.go, self.calls)

    def get_vocab(self):
        return {}

    def encode(self, text, add_special_tokens=True):
        self.calls.append((id(self), threading.current_thread().name))
        assert len(text) <= SURELY_QUICK or self.go.wait(PATIENCE), "the short text waits for the long one"
        return [1] * len(text)


def tokenizing(tokenizer):
    return Tokenizing(InputProcessor(tokenizer, 100, 10**6, frozenset(), 0), causal=True)


@pytest.mark.parametrize("params", [SamplingParams(), PoolingParams(task="embed")])
@pytest.mark.parametrize("form", [str, lambda text: {"prompt": text}], ids=["text", "dict"])
def test_short_prompts_do_not_wait_for_long_texts(params, form):
    go, calls = threading.Event(), []
    mine = tokenizing(Tokenizer(go, calls))

    async def both():
        long = asyncio.create_task(mine.tokenized(form(LONG), params))
        while not calls:
            await asyncio.sleep(1e-3)
        short = await mine.tokenized(form("abc"), params)
        assert short.token_ids == [1] * 3 and not long.done()
        go.set()
        assert (await long).token_ids == [1] * len(LONG)
        again = await mine.tokenized(form(LONG), params)
        assert again.token_ids == [1] * len(LONG)

    asyncio.run(both())
    mine.close()
    used = {tokenizer: {thread for one, thread in calls if one == tokenizer} for tokenizer, _ in calls}
    assert len(used) == 2 and all(len(threads) == 1 for threads in used.values()), "each thread has its own"


def test_a_tokenizer_that_cannot_be_copied_is_used_by_one_thread(caplog):
    go, calls = threading.Event(), []
    go.set()
    mine = tokenizing(Tokenizer(go, calls, copies=False))

    async def several():
        prompts = [LONG, "abc", LONG]
        return await asyncio.gather(*(mine.tokenized(prompt, SamplingParams()) for prompt in prompts))

    assert [len(one.token_ids) for one in asyncio.run(several())] == [len(LONG), 3, len(LONG)]
    mine.close()
    assert len(set(calls)) == 1
    assert caplog.text.count("the tokenizer cannot be copied (cannot pickle it)") == 1


def test_characters_of_a_conversation():
    assert characters([{"role": "user", "content": [{"type": "text", "text": "abc"}], "n": 3, "no": None}]) == 4 + 4 + 3
    assert characters(None) == characters(()) == 0


def test_long_texts_have_the_tokens_of_the_tokenizer(server, llm):
    """Whether they would fit or not."""
    text = "Once upon a time, there was a little dog. " * (SURELY_QUICK // 40)  # the server takes no more
    ids = llm.get_tokenizer().encode(text)
    assert len(text) > SURELY_QUICK and len(ids) > 2 * llm.llm_engine.model_config.max_model_len

    def post(path, **body):
        answer = server.client.post(path, json={"model": MODEL, **body})
        assert answer.status_code == 200, answer.text
        return answer.json()

    answer = post("/tokenize", prompt=text, return_token_strs=True)
    assert (answer["count"], answer["tokens"]) == (len(ids), ids)
    assert answer["token_strs"] == llm.get_tokenizer().convert_ids_to_tokens(ids)
    chat = [{"role": "user", "content": text}]
    count = post("/tokenize", messages=chat)["count"]
    assert count >= len(ids)
    assert post("/v1/messages/count_tokens", messages=chat)["input_tokens"] == count
    whole = {"prompt": ids[-9:], "max_tokens": 4, "temperature": 0}
    cut = {**whole, "prompt": text, "truncate_prompt_tokens": 9}
    assert (
        post("/v1/completions", **cut)["choices"][0]["text"] == post("/v1/completions", **whole)["choices"][0]["text"]
    )
