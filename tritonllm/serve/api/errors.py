"""Errors as OpenAI's API reports them: a JSON object ``{"error": {message, type, param, code}}`` and a status."""

import re
from collections.abc import Mapping
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from tritonllm.engine.data.asleep import AsleepError
from tritonllm.engine.text.input_processor import PromptTooLongError
from tritonllm.serve.api.fields import refused_field
from tritonllm.serve.api.protocol import Body
from tritonllm.serve.engines.async_llm import StoppedError
from tritonllm.serve.engines.engine_calls import CallFailedError
from tritonllm.serve.engines.engine_client import EngineDeadError
from tritonllm.serve.engines.room import QueueFullError

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
# What the engine, or a chat completion, calls by the first name may have others in bodies: the first that one has.
OTHER_NAMES = {
    "prompt": ("messages", "input"),
    "prompt_token_ids": ("prompt", "input"),
    "messages": ("input",),
    "beam_width": ("n",),
    "structured_outputs": ("text",),
    "response_format": ("text",),
    "reasoning_effort": ("reasoning",),
}
TOO_LONG = "context_length_exceeded"  # OpenAI's code
MOST_CHARACTERS = 2000  # of an error's message
RETRY_AFTER = 1  # seconds that a refused client should wait


class APIError(Exception):
    """Ends a request with a status and a message."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code


def as_api_error(error: Exception, request: Request | None = None) -> APIError:
    """What an exception of the engine or of a handler means to a client.

    Args:
        request: the request, whose body has the field that a ``ValueError`` is about.
    """
    if isinstance(error, APIError):
        return error
    if isinstance(error, QueueFullError):
        return APIError(429, str(error), code="queue_full")
    if isinstance(error, EngineDeadError):
        return APIError(503, f"the server cannot answer: {error}", code="engine_dead")
    if isinstance(error, StoppedError):
        return APIError(503, str(error), code="stopped")
    if isinstance(error, AsleepError):
        return APIError(503, str(error), code="asleep")
    if isinstance(error, CallFailedError):
        return APIError(503, str(error), code="failed")
    if isinstance(error, ValueError):
        code = TOO_LONG if isinstance(error, PromptTooLongError) else None
        return APIError(400, str(error), param=refused_field(str(error)) or _field_of(str(error), request), code=code)
    if isinstance(error, RecursionError):  # only what a request brings is nested as deep as that
        return APIError(400, "a field of the request is nested too deep")
    return APIError(500, "the server failed to answer this request", code="internal_error")


def _field_of(message: str, request: Request | None) -> str | None:
    """The field of the request's body with whose name a message begins, as all of them do that are about one."""
    body = None if request is None else _body_of(request)
    name = re.match(r"[a-z_][a-z_0-9]*(?![a-z_0-9'’-])", message)
    if body is None or name is None:
        return None
    return next((one for one in (name[0], *OTHER_NAMES.get(name[0], ())) if one in body.model_fields), None)


def _body_of(request: Request) -> type[Body] | None:
    """What the path's handler takes as ``body``."""
    body = getattr(request.scope.get("endpoint"), "__annotations__", {}).get("body")
    return body if isinstance(body, type) and issubclass(body, Body) else None


def error_body(error: APIError) -> dict[str, Any]:
    kind = TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return {"error": {"message": _text(error.message), "type": kind, "param": _text(error.param), "code": error.code}}


def _text(text: str | None) -> str | None:
    """A text for an error: what no encoding can write (half of a surrogate pair, from a request) as its escape, and not
    as long as what a client has sent and a message quotes."""
    if text is not None and len(text) > MOST_CHARACTERS:
        text = f"{text[:MOST_CHARACTERS]}..."
    return text and text.encode("utf-8", "backslashreplace").decode()


ANTHROPIC_PATHS = "/v1/messages"
ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
}


def anthropic_error(error: APIError) -> dict[str, Any]:
    """The body in the shape of Anthropic's API, which has no codes: clients know a prompt that is too long by how the
    message begins."""
    text = f"prompt is too long: {error.message}" if error.code == TOO_LONG else error.message
    kind = ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": _text(text)}}


def error_headers(error: APIError) -> Mapping[str, str]:
    if error.status == 429 or error.status == 503:
        return {"Retry-After": str(RETRY_AFTER)}
    return {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}


def error_response(error: APIError, path: str = "") -> JSONResponse:
    """The response that tells a client of an error, in the shape of the API that it has asked.

    Args:
        path: the path that was asked, which says whose API it is.
    """
    body = anthropic_error(error) if path.startswith(ANTHROPIC_PATHS) else error_body(error)
    return JSONResponse(body, error.status, headers=error_headers(error))


def unreadable_body(error: Exception) -> APIError | None:
    """What is wrong with a body that could not be parsed, if that is why a request is refused."""
    if isinstance(error.__cause__, UnicodeDecodeError):
        return APIError(400, "the body is not UTF-8: send JSON in UTF-8")
    return as_api_error(error.__cause__) if isinstance(error.__cause__, RecursionError) else None


def validation_error(error: RequestValidationError, request: Request) -> APIError:
    """The first thing that pydantic found wrong with the request's body, with the field's name."""
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"][1:] if not str(part).startswith(("list[", "function-")))
    place = place.removesuffix(".str")  # a kind that the field may be, too, as lists are
    if first["type"] == "missing" and not place:
        return APIError(400, "the body is missing: send a JSON object")
    if first["type"] == "model_attributes_type" and not place:
        return APIError(400, "the body must be a JSON object")
    if first["type"] == "json_invalid":
        return APIError(400, f"the body is not valid JSON: {first.get('ctx', {}).get('error', first['msg'])}")
    if first["type"] == "extra_forbidden":
        return APIError(400, f"unknown field {place!r}: leave it out", param=place)
    message = first["msg"].removeprefix("Value error, ")
    param = refused_field(message) or place or _field_of(message, request)
    about = place and not message.startswith(place)  # what is within has named its own place
    return APIError(400, f"{place}: {message}" if about else message, param=param)
