"""A client can neither begin a line of a log nor write to the terminal that shows it."""

import logging
import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.server import eventually
from support.waiting import PATIENCE

from tritonllm.system.log_text import MOST_CHARACTERS, OneLineFormatter, printable

NASTY = "a\r\nINFO tritonllm.serve.api.guard: GET /forged 200\x1b[2J\x1b]0;title\x07\u202e\u2028\x85é\ud800"


def formatted(text, **more):
    record = logging.LogRecord("tritonllm", logging.INFO, "", 1, "%s is what a client sent", (text,), None)
    for name, value in more.items():
        setattr(record, name, value)
    return OneLineFormatter("%(levelname)s %(name)s: %(message)s").format(record)


@settings(max_examples=examples(100), deadline=None)
@given(st.one_of(st.text(), st.text(st.sampled_from(NASTY))))
def test_a_message_is_one_line_that_can_be_shown(text):
    line = formatted(text)
    assert line.isprintable() and line.startswith("INFO tritonllm: ") and line.endswith(" is what a client sent")
    assert printable(text).isprintable()
    if text.isprintable():
        assert text in line and printable(text) == text


def test_escapes_say_what_was_there():
    assert printable("/v1/a\r\n\x1b[31mé/é") == r"/v1/a\r\n\x1b[31mé/é"
    assert printable(NASTY).endswith(r"\u202e\u2028\x85é\ud800")


def test_a_quoted_text_has_an_end():
    assert printable("a" * MOST_CHARACTERS) == "a" * MOST_CHARACTERS
    assert printable("a" * 50_000) == "a" * MOST_CHARACTERS + "... (50000 characters)"


def test_lines_of_a_traceback_begin_like_no_message():
    try:
        raise ValueError(NASTY)
    except ValueError as error:
        text = formatted("x", exc_info=(type(error), error, error.__traceback__), stack_info="Stack:\n" + NASTY)
    first, *rest = text.split("\n")
    assert first == "INFO tritonllm: x is what a client sent"
    assert "Traceback" in rest[0] and all(line.startswith("  ") and line.isprintable() for line in rest)


@pytest.mark.parametrize("path", ["/v1/%0D%0AINFO%20forged%1B[31m", "/v1/models/%0D%0AINFO%20forged%1B[31m"])
def test_a_request_line_is_escaped_in_the_servers_log(server, path):
    host, _, port = server.url.removeprefix("http://").partition(":")
    before = len(server.log)
    with socket.create_connection((host, int(port)), PATIENCE) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert connection.recv(1000).startswith(b"HTTP/1.1 ")
    eventually(lambda: any(r"\r\nINFO forged\x1b[31m" in line for line in server.log[before:]))
    assert not any(line.startswith("INFO forged") or "\x1b" in line for line in server.log)
