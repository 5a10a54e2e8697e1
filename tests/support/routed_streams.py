"""Streamed completions through a router, and whether each of them is whole or ended with one error."""

import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import httpx

from support.server import MODEL
from support.waiting import PATIENCE


class Ended(NamedTuple):
    """What came of a stream: its token ids, its errors, and how often ``[DONE]`` came."""

    prompt: str
    tokens: list[int]
    errors: list[Any]
    done: int


class Streams:
    """Greedy completions that threads read, in the network namespace of the thread that makes this.

    Args:
        client: of the router.
        prompts: of one stream each.
        max_tokens: of each.
    """

    def __init__(self, client: httpx.Client, prompts: Sequence[str], max_tokens: int) -> None:
        self.begun = 0
        self.ends: list[Ended] = []
        self._client, self._max_tokens = client, max_tokens
        self._threads = [threading.Thread(target=self._read, args=(prompt,)) for prompt in prompts]
        for thread in self._threads:
            thread.start()

    def _read(self, prompt: str) -> None:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": self._max_tokens, "temperature": 0, "stream": True}
        tokens: list[int] = []
        errors, done = [], 0
        with self._client.stream(
            "POST", "/v1/completions", json={**body, "ignore_eos": True, "return_token_ids": True}
        ) as answer:
            if answer.status_code != 200:
                errors.append(json.loads(answer.read())["error"])
            for line in [] if errors else answer.iter_lines():
                content = line.removeprefix("data: ")
                if content == "[DONE]":
                    done += 1
                elif content and "error" in (event := json.loads(content)):
                    errors.append(event["error"])
                elif content:
                    self.begun += not tokens
                    tokens += event["choices"][0]["token_ids"]
        self.ends.append(Ended(prompt, tokens, errors, done))

    def end(self) -> list[Ended]:
        for thread in self._threads:
            thread.join(PATIENCE)
            assert not thread.is_alive(), "a stream hangs"
        return self.ends


def count_whole(ends: Sequence[Ended], expected: Mapping[str, Sequence[int]]) -> int:
    """How many have all tokens that are expected of their prompts. All others must have the first of them, and then one
    error."""
    whole = 0
    for prompt, tokens, errors, done in ends:
        ids = list(expected[prompt])
        if errors:
            assert len(errors) == 1 and done == 0
            assert tokens == ids[: len(tokens)], "a token is missing, wrong, or came twice"
        else:
            assert (tokens, done) == (ids, 1)
            whole += 1
    return whole
