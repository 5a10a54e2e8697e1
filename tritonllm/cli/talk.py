"""Who answers ``tritonllm chat`` and ``tritonllm complete``: an engine in this process, or a server."""

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from tritonllm.cli.remote import UNREADABLE, error_text, first_model, message_of
from tritonllm.config.sampling_params import RequestOutputKind, SamplingParams

Message = Mapping[str, str]


class Talker(Protocol):
    """Answers in parts. A generator that is closed ends its request."""

    def chat(self, messages: Sequence[Message]) -> Iterator[str]: ...

    def complete(self, prompt: str) -> Iterator[str]: ...


class LocalTalker:
    """A talker that asks an engine in this process.

    Args:
        llm: an :class:`LLM`.
        params: the sampling parameters of all answers.
    """

    def __init__(self, llm: Any, params: SamplingParams) -> None:
        self._llm, self._params = llm, params.clone()
        self._params.output_kind = RequestOutputKind.DELTA
        self._count = 0

    def chat(self, messages: Sequence[Message]) -> Iterator[str]:
        return self._answer(self._llm.render_chat(list(messages)))

    def complete(self, prompt: str) -> Iterator[str]:
        return self._answer(prompt)

    def _answer(self, prompt: Any) -> Iterator[str]:
        engine = self._llm.engine
        self._count += 1
        request_id = str(self._count)
        engine.add_request(request_id, prompt, self._params)
        try:
            while engine.has_unfinished_requests():
                for output in engine.step():
                    if output.error is not None:
                        raise RuntimeError(output.error)
                    yield output.outputs[0].text
        finally:
            engine.abort_request([request_id])


class RemoteTalker:
    """A talker that asks a server with OpenAI's API.

    Args:
        url: the address of the server, with or without ``/v1``.
        model: a name of a model that it serves; ``None``: its first.
        key: an API key, if it wants one.
        fields: the fields that all requests have.

    Raises:
        RuntimeError: it does not answer, or not as such a server does.
    """

    def __init__(self, url: str, model: str | None, key: str | None, fields: Mapping[str, Any]) -> None:
        self._base = url.rstrip("/").removesuffix("/v1") + "/v1"
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        if model is None:
            with self._open("/models") as response:
                try:
                    model = first_model(response.read())
                except (ValueError, http.client.HTTPException) as error:
                    raise RuntimeError(f"--url: the server does not tell its models: {error}") from error
        self._fields = {"model": model, "stream": True, **fields}

    def chat(self, messages: Sequence[Message]) -> Iterator[str]:
        body = {"messages": list(messages)}
        return self._texts("/chat/completions", body, lambda choice: choice["delta"].get("content"))

    def complete(self, prompt: str) -> Iterator[str]:
        return self._texts("/completions", {"prompt": prompt}, lambda choice: choice["text"])

    def _texts(self, path: str, body: Mapping[str, Any], text_of: Callable[[Any], str | None]) -> Iterator[str]:
        """The texts of a streamed answer, as they come.

        Raises:
            RuntimeError: an answer that is an error, or that cannot be read.
        """
        with self._open(path, {**self._fields, **body}) as response:
            try:
                for line in response:
                    data = line.removeprefix(b"data:").strip()
                    if not line.startswith(b"data:") or data == b"[DONE]":
                        continue
                    event = json.loads(data)
                    if event.get("error") is not None:
                        raise RuntimeError(f"the server: {error_text(event['error'])}")
                    for choice in event["choices"]:
                        yield str(text_of(choice) or "")
            except (http.client.HTTPException, *UNREADABLE) as error:
                raise RuntimeError(f"the server's answer cannot be read: {type(error).__name__}: {error}") from error

    def _open(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Send a request, and return the open answer.

        Raises:
            RuntimeError: no server, or an answer that is an error.
        """
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data, self._headers)
        try:
            return urllib.request.urlopen(request)
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"the server: {message_of(error.read())} (status {error.code})") from error
        except (urllib.error.URLError, http.client.HTTPException, ValueError) as error:
            raise RuntimeError(f"--url: {self._base} does not answer: {getattr(error, 'reason', error)}") from error
