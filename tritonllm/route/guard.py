"""What a request passes before it goes to a backend: the key, the number of requests, its body."""

import asyncio
import hashlib
import hmac
import re
import uuid
from collections.abc import Mapping, Sequence

from tritonllm.route.errors import RouteError
from tritonllm.route.reply import Receive

REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
BODY_SECONDS = 60.0  # that a client may take to send a body


def request_id_of(headers: Mapping[bytes, bytes]) -> str:
    """The client's own, if it can stand in a log, or a new one."""
    given = headers.get(b"x-request-id", b"").decode("latin-1")
    return given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def check_key(headers: Mapping[bytes, bytes], keys: Sequence[str]) -> None:
    """Raises:
    RouteError: there are keys, and the request has none of them. The time it takes does not tell how much fits.
    """
    if not keys:
        return
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() != b"bearer":
        token = headers.get(b"x-api-key", b"")  # as Anthropic's clients send it
    given = _digest(token.strip())
    matches = [hmac.compare_digest(given, _digest(key.encode())) for key in keys]  # all of them, whichever fits
    if not any(matches):
        raise RouteError(401, "the API key is missing or wrong: send Authorization: Bearer", "invalid_api_key")


def _digest(secret: bytes) -> bytes:
    """Of one length, whatever the secret's."""
    return hashlib.sha256(secret).digest()


async def receive_body(headers: Mapping[bytes, bytes], receive: Receive, most: int) -> bytes | None:
    """The whole body; ``None`` if the client went away while it sent it.

    Raises:
        RouteError: it is longer than ``most`` bytes, or takes too long to arrive.
    """
    too_long = RouteError(413, f"the body is longer than {most} bytes", "body_too_large")
    length = headers.get(b"content-length", b"0")
    if not length.isdigit() or int(length) > most:
        raise too_long
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > most:
                    raise too_long
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError:
        raise RouteError(408, f"the body did not arrive within {BODY_SECONDS:g} seconds", "body_timeout") from None
