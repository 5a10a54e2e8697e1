"""Streamed completions that threads read, and clients that leave."""

import http.client
import json
import threading

import httpx
import psutil

from support.server import MODEL
from support.waiting import PATIENCE, eventually

LONG = {"model": MODEL, "prompt": "There was a fox named", "max_tokens": 2000, "ignore_eos": True, "temperature": 0}


class Stream:
    """A streamed completion that a thread reads to its end.

    Args:
        server: to ask.
        wait: for its first event.
        more: fields of the request.
    """

    def __init__(self, server, wait=True, **more):
        self.prompt = more.get("prompt", LONG["prompt"])
        self.events: list[str] = []
        self.begun = threading.Event()
        self.thread = threading.Thread(target=self._read, args=(server.url, {**LONG, **more, "stream": True}))
        self.thread.start()
        assert not wait or self.begun.wait(PATIENCE)

    def _read(self, url, body):
        try:
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE) as response:
                for line in response.iter_lines():
                    if line:
                        self.events.append(line.removeprefix("data: "))
                        self.begun.set()
        except httpx.TransportError as error:  # the server went away in the middle
            self.events.append(repr(error))
        self.begun.set()

    def tokens(self):
        """All that came, of a request with ``return_token_ids``."""
        *events, last = self.end()
        assert last == "[DONE]"
        return [token for event in events for token in json.loads(event)["choices"][0]["token_ids"]]

    def end(self):
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive(), "the stream hangs"
        return self.events


def leave(url, body, when, path="/v1/completions", headers=None):
    """Ask, and close the connection as soon as ``when()`` is true."""
    asking = http.client.HTTPConnection(url.removeprefix("http://"))
    try:
        asking.request("POST", path, json.dumps(body), {"Content-Type": "application/json", **(headers or {})})
        eventually(when)
    finally:
        asking.close()


def all_gone(processes):
    """They have ended, whether or not somebody has taken note of it."""
    for process in processes:
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                return False
        except psutil.NoSuchProcess:
            pass
    return True
