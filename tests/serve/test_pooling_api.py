"""Embeddings, scores, ranks and classes over HTTP, against the offline engine."""

import asyncio
import base64
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import httpx
import numpy as np
import pytest
from support.classifiers import write_model
from support.encoders import encoder_config
from support.engines import tiny_checkpoint, tiny_llm
from support.imported_processes import imported_processes
from support.tiny_tokenizer import VOCAB_SIZE, save_tokenizer

from tritonllm import AsyncEngineArgs, AsyncLLM, PoolingParams
from tritonllm.serve.api.app import make_app
from tritonllm.serve.api.config import ServerConfig

ENGINE = {"block_size": 4, "num_gpu_blocks_override": 64, "max_num_seqs": 4, "max_num_batched_tokens": 64}
TEXTS = ["the quick brown fox", "jumps over the lazy dog", "0 1 2 3"]


@cache
def classifier(labels: int) -> Path:
    """A tiny BERT that classifies."""
    folder = Path(mkdtemp(prefix="tiny-cross-encoder-"))
    names = {str(label): f"class {label}" for label in range(labels)}
    write_model(folder, encoder_config("bert", vocab_size=VOCAB_SIZE, num_labels=labels, id2label=names))
    save_tokenizer(folder)
    return folder


class Server:
    """A server in this process; calls return status and body."""

    def __init__(self, model: Path, **settings: Any) -> None:
        with imported_processes():
            self.llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(model), **{**ENGINE, **settings}))
        self._runner = asyncio.Runner()
        transport = httpx.ASGITransport(make_app(self.llm, ServerConfig(model_names=("m",))))
        self._client = httpx.AsyncClient(transport=transport, base_url="http://server")

    def post(self, path: str, **body: Any) -> tuple[int, Any]:
        reply = self._runner.run(self._client.post(path, json=body))
        return reply.status_code, reply.json()

    def encode(self, *args: Any) -> list[Any]:
        async def all_of_it() -> list[Any]:
            return [output async for output in self.llm.encode(*args)]

        return self._runner.run(all_of_it())

    def close(self) -> None:
        self._runner.close()
        self.llm.shutdown()


@contextmanager
def serving(model: Path, **settings: Any):
    server = Server(model, **settings)
    try:
        yield server
    finally:
        server.close()


@pytest.fixture(scope="module")
def decoder():
    with serving(tiny_checkpoint()) as server:
        yield server


@pytest.fixture(scope="module")
def cross_encoder():
    with serving(classifier(1), max_model_len=64) as server:
        yield server


def test_embeddings(decoder):
    llm = tiny_llm()
    vectors = [output.outputs.embedding for output in llm.embed(TEXTS, use_tqdm=False)]
    status, reply = decoder.post("/v1/embeddings", model="m", input=TEXTS, user="somebody")
    assert status == 200 and (reply["object"], reply["model"]) == ("list", "m")
    assert [entry["index"] for entry in reply["data"]] == [0, 1, 2]
    np.testing.assert_allclose([entry["embedding"] for entry in reply["data"]], vectors, atol=1e-6)
    count = sum(len(llm.get_tokenizer().encode(text)) for text in TEXTS)
    assert (reply["usage"]["prompt_tokens"], reply["usage"]["total_tokens"]) == (count, count)
    _, reply = decoder.post("/v1/embeddings", input=TEXTS, encoding_format="base64")
    found = [np.frombuffer(base64.b64decode(entry["embedding"]), "<f4") for entry in reply["data"]]
    np.testing.assert_allclose(found, vectors, atol=1e-6)


def test_one_input_of_token_ids(decoder):
    (expected,) = tiny_llm().embed([[5, 6, 7]], pooling_params=PoolingParams(normalize=False), use_tqdm=False)
    for given in ([5, 6, 7], [[5, 6, 7]]):
        _, reply = decoder.post("/v1/embeddings", input=given, normalize=False)
        (entry,) = reply["data"]
        np.testing.assert_allclose(entry["embedding"], expected.outputs.embedding, rtol=1e-5)


def test_generation_beside(decoder):
    status, reply = decoder.post("/v1/completions", prompt=TEXTS[0], max_tokens=3)
    assert status == 200 and reply["usage"]["completion_tokens"] == 3


def test_vectors_of_tokens(decoder):
    (expected,) = tiny_llm().encode([TEXTS[0]], pooling_task="token_embed", use_tqdm=False)
    status, reply = decoder.post("/pooling", input=TEXTS[0], task="token_embed")
    assert status == 200
    np.testing.assert_allclose(reply["data"][0]["data"], expected.outputs.data, atol=1e-6)


def test_scores_of_embeddings(decoder):
    expected = [output.outputs.score for output in tiny_llm().score(TEXTS[0], TEXTS, use_tqdm=False)]
    for names in (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents")):
        status, reply = decoder.post("/v1/score", **dict(zip(names, (TEXTS[0], TEXTS), strict=True)))
        assert status == 200
        np.testing.assert_allclose([entry["score"] for entry in reply["data"]], expected, atol=1e-6)


def test_scores_of_a_cross_encoder(cross_encoder):
    llm = tiny_llm(classifier(1), num_blocks=None, max_model_len=64)
    expected = [output.outputs.score for output in llm.score(TEXTS[0], TEXTS, use_tqdm=False)]
    status, reply = cross_encoder.post("/score", text_1=TEXTS[0], text_2=TEXTS)
    assert status == 200
    np.testing.assert_allclose([entry["score"] for entry in reply["data"]], expected, atol=1e-6)
    status, reply = cross_encoder.post("/v1/rerank", query=TEXTS[0], documents=[TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]])
    assert status == 200
    order = sorted(range(3), key=lambda i: -expected[i])
    assert [entry["index"] for entry in reply["results"]] == order
    assert [entry["document"]["text"] for entry in reply["results"]] == [TEXTS[i] for i in order]
    found = [entry["relevance_score"] for entry in reply["results"]]
    np.testing.assert_allclose(found, sorted(expected)[::-1], atol=1e-6)
    _, reply = cross_encoder.post("/rerank", query=TEXTS[0], documents=TEXTS, top_n=1, return_documents=False)
    assert [set(entry) for entry in reply["results"]] == [{"index", "relevance_score"}]


def test_classes():
    with serving(classifier(3), max_model_len=64) as server:
        llm = tiny_llm(classifier(3), num_blocks=None, max_model_len=64)
        status, reply = server.post("/classify", input=TEXTS)
        assert status == 200
        for entry, output in zip(reply["data"], llm.classify(TEXTS, use_tqdm=False), strict=True):
            probs = output.outputs.probs
            np.testing.assert_allclose(entry["probs"], probs, atol=1e-6)
            assert (entry["label"], entry["num_classes"]) == (f"class {int(np.argmax(probs))}", 3)
        status, reply = server.post("/score", text_1="the", text_2="fox")
        assert status == 400 and "one label, this one has 3" in reply["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/embeddings", {"input": ""}, "input is empty"),
        ("/v1/embeddings", {"input": []}, "input is empty"),
        ("/v1/embeddings", {"input": ["the", [1]]}, "input: must be a text, token ids, or a list of texts or of lists"),
        ("/v1/embeddings", {"input": "the", "encoding_format": "int8"}, "encoding_format"),
        ("/v1/embeddings", {"input": "the", "dimensions": 8}, "set is_matryoshka to true"),
        ("/v1/embeddings", {"input": "the", "dimensions": 0}, "dimensions must be"),
        ("/v1/embeddings", {"input": [10**6]}, "prompt_token_ids must be integers"),
        ("/v1/embeddings", {"input": "the " * 500}, "max_model_len"),
        ("/v1/embeddings", {"input": "the", "task": "retrieval.query"}, "task: not supported here"),
        ("/classify", {"input": "the"}, "task='classify' is not one of Qwen3ForCausalLM"),
        ("/pooling", {"input": "the", "task": "rank"}, "task"),
        ("/score", {"text_1": "the"}, "give one of these pairs"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1 has 2 entries and text_2 has 3"),
        ("/rerank", {"query": "the", "documents": []}, "documents"),
        ("/rerank", {"query": "the", "documents": [{"image": "x"}]}, "documents must be texts"),
    ],
)
def test_bad_requests(decoder, path, body, message):
    status, reply = decoder.post(path, **body)
    assert status == 400 and message in reply["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "param", "begins"),
    [
        ("/score", {"text_1": "the", "text_2": ["fox", "the " * 500]}, "text_2", "text_2[1] with text_1 has "),
        ("/rerank", {"query": "the", "documents": ["the " * 500]}, "documents", "documents[0] with query has "),
    ],
)
def test_a_pair_that_is_too_long_has_the_names_of_both_texts(cross_encoder, path, body, param, begins):
    status, reply = cross_encoder.post(path, **body)
    assert (status, reply["error"]["param"]) == (400, param)
    assert reply["error"]["message"].startswith(begins)


def test_generation_is_refused_by_name(cross_encoder):
    status, reply = cross_encoder.post("/v1/completions", prompt="the", max_tokens=2)
    assert status == 400 and "BertForSequenceClassification is an encoder" in reply["error"]["message"]


def test_the_generator(decoder):
    (output,) = decoder.encode(TEXTS[0], PoolingParams(task="embed"), "r")
    (expected,) = tiny_llm().encode([TEXTS[0]], pooling_task="embed", use_tqdm=False)
    assert output.finished and output.prompt_token_ids == expected.prompt_token_ids
    np.testing.assert_allclose(output.outputs.data, expected.outputs.data, atol=1e-6)
    for params, message in ((PoolingParams(), "pooling needs a task"), (None, "pooling_params must be PoolingParams")):
        with pytest.raises(ValueError, match=message):
            decoder.encode(TEXTS[0], params, "s")
    assert decoder.llm.num_unfinished == 0
