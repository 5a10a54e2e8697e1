"""The bodies of requests that pool: OpenAI's fields for embeddings, vLLM's and Jina's for scores and ranks."""

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from tritonllm.config.pooling_params import PoolingParams, PoolingTask
from tritonllm.serve.api.fields import POOLING, PROMPT
from tritonllm.serve.api.protocol import Body, Prompts, Strings, Word

Document = str | dict[str, str]


class Named(NamedTuple):
    """A text, and what errors call it."""

    name: str
    text: str


def _named(field: str, given: str | Sequence[str]) -> list[Named]:
    if isinstance(given, str):
        return [Named(field, given)]
    return [Named(f"{field}[{index}]", text) for index, text in enumerate(given)]


class PoolingBody(Body):
    """What all of them have; ``None`` leaves a field to the model's default."""

    refused = MappingProxyType({**PROMPT, **POOLING})

    model: str | None = None
    truncate_prompt_tokens: int | None = None
    use_activation: bool | None = None
    priority: Word = 0
    request_id: str | None = Field(default=None, min_length=1, max_length=128)

    def pooling_params(self, task: PoolingTask, **more: Any) -> PoolingParams:
        """The pooling parameters that the body asks for.

        Raises:
            ValueError: a value outside its range.
        """
        common: Any = {"truncate_prompt_tokens": self.truncate_prompt_tokens, "use_activation": self.use_activation}
        return PoolingParams(task=task, **common, **more)


class InputBody(PoolingBody):
    """A body with texts or token ids, one or several."""

    input: Prompts
    encoding_format: Literal["float", "base64"] = "float"

    @model_validator(mode="after")
    def _check_inputs(self) -> Self:
        if not self.input:
            raise ValueError("input is empty: it needs at least one token")
        return self

    def inputs(self) -> Sequence[str | list[int]]:
        if isinstance(self.input, str) or isinstance(self.input[0], int):
            return [self.input]
        return self.input


class EmbeddingRequest(InputBody):
    """The body of ``POST /v1/embeddings``."""

    dimensions: int | None = None
    normalize: bool | None = None


class ClassifyRequest(InputBody):
    """The body of ``POST /classify``."""


class PoolingRequest(InputBody):
    """The body of ``POST /pooling``."""

    task: PoolingTask | None = None
    dimensions: int | None = None
    normalize: bool | None = None


class ScoreRequest(PoolingBody):
    """``POST /score``: one text and several, or as many of both; under any of vLLM's three pairs of names."""

    text_1: str | Strings | None = None
    text_2: str | Strings | None = None
    data_1: str | Strings | None = None
    data_2: str | Strings | None = None
    queries: str | Strings | None = None
    documents: str | Strings | None = None

    @model_validator(mode="after")
    def _check_texts(self) -> Self:
        self.texts()
        return self

    def texts(self) -> tuple[list[Named], list[Named]]:
        """The texts of both sides; both have the same number.

        Raises:
            ValueError: none of the pairs, more than one, or lengths that do not fit.
        """
        pairs = (
            ("text_1", self.text_1, "text_2", self.text_2),
            ("data_1", self.data_1, "data_2", self.data_2),
            ("queries", self.queries, "documents", self.documents),
        )
        given = [pair for pair in pairs if pair[1] is not None or pair[3] is not None]
        if len(given) != 1 or given[0][1] is None or given[0][3] is None:
            raise ValueError("text_1 and text_2, data_1 and data_2, queries and documents: give one of these pairs")
        ((name, one, other_name, other),) = given
        first, second = _named(name, one or []), _named(other_name, other or [])
        if not first or not second or len(first) not in (1, len(second)):
            raise ValueError(
                f"{name} has {len(first)} entries and {other_name} has {len(second)}: give one for all, or as many"
            )
        return first * (len(second) // len(first)), second


class RerankRequest(PoolingBody):
    """The body of ``POST /rerank``."""

    query: str
    documents: list[Document] = Field(min_length=1, fail_fast=True)
    top_n: int = Field(default=0, ge=0)
    return_documents: bool = True

    @model_validator(mode="after")
    def _check_documents(self) -> Self:
        self.texts()
        return self

    def texts(self) -> list[Named]:
        """The texts of the documents, with their names for errors.

        Raises:
            ValueError: a document that is neither text nor an object with one.
        """
        for document in self.documents:
            if isinstance(document, dict) and set(document) != {"text"}:
                raise ValueError('documents must be texts, or objects {"text": ...}')
        return _named("documents", [one if isinstance(one, str) else one["text"] for one in self.documents])
