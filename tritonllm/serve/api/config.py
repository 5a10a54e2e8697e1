"""What an operator chooses about the server; the engine has its own configuration."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tritonllm.engine.text.chat import ChatOptions
from tritonllm.http.guard import HEADER_TIMEOUT, MAX_HEADER_BYTES, MAX_HEADER_COUNT, HeadLimits
from tritonllm.serve.engines.profiling import ProfilerConfig
from tritonllm.serve.parsing.choose import check_names
from tritonllm.serve.parsing.plugins import Plugins, load_plugins

ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s?#*]+")


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """What a server is started with: names, addresses, keys, limits.

    Args:
        model_names: the names under which requests may ask for the model; the first one is in answers.
        host, port: where to listen. By default only this machine can connect.
        uds: a Unix socket to listen on instead.
        api_keys: one of them must come as ``Authorization: Bearer``; none: everybody may ask.
        chat_template: a Jinja template to use instead of the tokenizer's.
        default_chat_template_kwargs: variables of the template for requests that do not bring these.
        tool_call_parser, reasoning_parser: how calls of tools and thoughts are read out of answers, by name; ``"none"``
            leaves them in the text, ``None`` goes by the chat template where that is clear, ``"auto"`` insists on it.
        tool_parser_plugin, reasoning_parser_plugin: Python files that have more parsers
            (:func:`tritonllm.serve.parsing.plugins.load_plugins`).
        enable_auto_tool_choice: whether there must be a parser for calls.
        trust_request_chat_template: whether a request may bring its own template.
        strict_fields: whether a field of a request that changes nothing, unknown or not, is an error.
        max_body_bytes: how many bytes the body of a request may have.
        max_header_bytes, max_header_count: how many bytes a request's line and headers may have together, and how many
            headers there may be.
        header_timeout: how long a client may take to send them, in seconds.
        max_concurrency: how many requests may be answered at once.
        drain_seconds: how long running requests may take after SIGTERM.
        ssl_certfile, ssl_keyfile: the files of the certificate and of its key, for TLS.
        root_path: under which what stands before the server offers its paths, as ``/llm``; it may take that away.
        api_server_count: how many processes speak HTTP, in front of one engine.
        server_dev_mode: whether clients may put the engine to sleep, wake it up, reload its weights, empty its prefix
            cache, and ask what its experts have to do.
        enable_tokenizer_info_endpoint: whether clients may read the tokenizer's configuration and the chat template.
        profiler_config: whether clients may let the engine write traces, and where to.
        otlp_traces_endpoint: URL of an OpenTelemetry collector that gets a span for each request.
        request_timeout: how many seconds a request may take; ``None``: as many as it needs.
        allowed_origins: the origins of pages in browsers that may ask, as ``https://chat.example``; ``"*"`` is any, and
            none is the default (CORS). Their requests need the key like others.
        restart: how often within ten minutes an engine that has died is started anew; then the server ends.

    Raises:
        ValueError: a bad value; the message names the option.
    """

    model_names: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    root_path: str = ""
    api_keys: tuple[str, ...] = ()
    chat_template: str | None = None
    default_chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    tool_parser_plugin: str | None = None
    reasoning_parser_plugin: str | None = None
    enable_auto_tool_choice: bool = False
    trust_request_chat_template: bool = False
    strict_fields: bool = False
    max_body_bytes: int = 16 << 20
    max_header_bytes: int = MAX_HEADER_BYTES
    max_header_count: int = MAX_HEADER_COUNT
    header_timeout: float = HEADER_TIMEOUT
    max_concurrency: int = 4096
    drain_seconds: float = 30.0
    api_server_count: int = 1
    server_dev_mode: bool = False
    enable_tokenizer_info_endpoint: bool = False
    profiler_config: ProfilerConfig | None = None
    otlp_traces_endpoint: str | None = None
    request_timeout: float | None = None
    allowed_origins: tuple[str, ...] = ()
    restart: int = 0
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None

    def __post_init__(self) -> None:
        if not self.model_names or not all(self.model_names):
            raise ValueError("--served-model-name must not be empty")
        if not all(self.api_keys):
            raise ValueError("--api-key must not be empty: leave it out to let everybody ask")
        for origin in self.allowed_origins:
            if origin != "*" and not ORIGIN.fullmatch(origin):
                raise ValueError(
                    "--allowed-origins must be '*', or as a browser sends them, https://chat.example or "
                    f"http://localhost:3000, without a path; got {origin!r}"
                )
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ValueError(f"--root-path must begin with / and not end with it, as /llm, got {self.root_path!r}")
        try:
            ChatOptions(chat_template_kwargs=self.default_chat_template_kwargs)
        except ValueError as error:
            raise ValueError(f"--default-chat-template-kwargs: {error}") from error
        check_names(self.tool_call_parser, self.reasoning_parser, self.own_parsers())
        if not 0 <= self.port <= 65535:
            raise ValueError(f"--port must be from 0 to 65535, got {self.port}")
        least_one = (
            ("max-body-bytes", self.max_body_bytes),
            ("max-header-bytes", self.max_header_bytes),
            ("max-header-count", self.max_header_count),
            ("max-concurrency", self.max_concurrency),
            ("api-server-count", self.api_server_count),
        )
        for name, value in least_one:
            if value < 1:
                raise ValueError(f"--{name} must be at least 1, got {value}")
        if self.restart < 0:
            raise ValueError(f"--restart must be at least 0, got {self.restart}")
        if self.restart and self.api_server_count > 1:
            raise ValueError("--restart needs one process that speaks HTTP: leave --api-server-count at 1")
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ValueError("--ssl-certfile and --ssl-keyfile need each other: give both, or none")
        if self.otlp_traces_endpoint is not None and not self.otlp_traces_endpoint.startswith(("http://", "https://")):
            raise ValueError(
                "--otlp-traces-endpoint must be a URL, as http://localhost:4318/v1/traces (OTLP over HTTP), got "
                f"{self.otlp_traces_endpoint!r}"
            )
        if not self.drain_seconds >= 0:
            raise ValueError(f"--drain-seconds must be at least 0, got {self.drain_seconds}")
        for name, seconds in (("request-timeout", self.request_timeout), ("header-timeout", self.header_timeout)):
            if seconds is not None and not seconds > 0:
                raise ValueError(f"--{name} must be greater than 0, got {seconds}")

    @property
    def head_limits(self) -> HeadLimits:
        return HeadLimits(self.max_header_bytes, self.max_header_count, self.header_timeout)

    def own_parsers(self) -> Plugins:
        """The parsers of the plugins, whose files are run.

        Raises:
            ValueError: see :func:`~tritonllm.serve.parsing.plugins.load_plugins`.
        """
        return load_plugins(self.tool_parser_plugin, self.reasoning_parser_plugin)
