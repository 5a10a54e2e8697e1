"""Errors of the router's own, in the shape of the API that was asked: OpenAI's or Anthropic's (``/v1/messages``)."""

import json
import math
from typing import Any

TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
RESPONSES_PATH = "/v1/responses"
ANTHROPIC_PATHS = "/v1/messages"
ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
}


class RouteError(Exception):
    """Ends a request with a status and a message.

    Args:
        code: a word for programs.
        retry_after: seconds that a refused client should wait.
        told: what the client reads, where the message is for the log alone.
        param: the field of the body that is wrong.
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        retry_after: float = 1.0,
        told: str | None = None,
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.retry_after = status, message, code, retry_after
        self.param = param
        self.told = message if told is None else told

    def body(self, path: str) -> dict[str, Any]:
        default = "invalid_request_error" if self.status < 500 else "server_error"
        if path.startswith(ANTHROPIC_PATHS):
            kind = ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
            return {"type": "error", "error": {"type": kind, "message": self.told}}
        kind = TYPES.get(self.status, default)
        return {"error": {"message": self.told, "type": kind, "param": self.param, "code": self.code}}

    def content(self, path: str) -> bytes:
        return json.dumps(self.body(path)).encode()

    def event(self, path: str) -> bytes:
        """The last event of a stream that has begun."""
        if path == RESPONSES_PATH:  # its events have a name and no envelope
            content = {"type": "error", "code": self.code, "message": self.told, "param": self.param}
            return b"event: error\ndata: %b\n\n" % json.dumps(content).encode()
        name = b"event: error\n" if path.startswith(ANTHROPIC_PATHS) else b""
        return b"%bdata: %b\n\n" % (name, self.content(path))

    def headers(self) -> list[tuple[bytes, bytes]]:
        found = [(b"content-type", b"application/json")]
        if self.status in (429, 503):
            found.append((b"retry-after", b"%d" % max(1, math.ceil(self.retry_after))))
        if self.status == 401:
            found.append((b"www-authenticate", b"Bearer"))
        return found
