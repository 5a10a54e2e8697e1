"""What an operator chooses about the router: from options of the command line, or from a TOML file."""

import dataclasses
import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tritonllm import env
from tritonllm.http.guard import HEADER_TIMEOUT, MAX_HEADER_BYTES, MAX_HEADER_COUNT, HeadLimits

ROLES = ("", "prefill")
POLICIES = ("prefix", "least-tokens", "round-robin")
MORE_THAN_ZERO = (
    "connect_timeout",
    "first_byte_timeout",
    "between_bytes_timeout",
    "host_timeout",
    "health_interval",
    "health_timeout",
    "backoff_seconds",
    "header_timeout",
)
AT_LEAST_ONE = (
    "sticky_chars",
    "unhealthy_threshold",
    "healthy_threshold",
    "failure_threshold",
    "max_concurrency",
    "max_body_bytes",
    "max_header_bytes",
    "max_header_count",
    "max_held_bytes",
)
AT_LEAST_ZERO = (
    "balance_epsilon",
    "balance_min_tokens",
    "prefill_min_tokens",
    "max_retries",
    "retry_ratio",
    "retry_reserve",
    "drain_seconds",
)
NEEDS_RESTART = (
    *("host", "port", "ssl_certfile", "ssl_keyfile"),
    *("max_header_bytes", "max_header_count", "header_timeout"),
)


@dataclass(frozen=True, kw_only=True)
class BackendConfig:
    """A server that requests can go to.

    Args:
        url: the address that the server listens at, without ``/v1``.
        name: its name in logs and metrics, and in the hash that places prompts; by default the URL.
        models: the names of the models that it serves; empty: what its ``/v1/models`` says.
        api_key: the key that is sent in place of the client's.
        api_key_env: the name of the environment variable that holds that key.
        health_path: the path that a probe asks for; any status of 2xx is health.
        role: ``prefill``: it computes prompts for the others, and answers no client.

    Raises:
        ValueError: a bad value; the message names the backend and the field.
    """

    url: str
    name: str = ""
    models: tuple[str, ...] = ()
    api_key: str | None = None
    api_key_env: str | None = None
    health_path: str = "/health"
    role: str = ""

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        try:
            good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
        except ValueError:  # a port that is no number
            good = False
        if not good or parts.query or parts.fragment:
            raise ValueError(f"backend {self.url!r}: url must be as http://host:port")
        if self.url.rstrip("/").endswith("/v1"):
            raise ValueError(f"backend {self.url!r}: leave /v1 out of url; requests bring their own path")
        if not self.health_path.startswith("/"):
            raise ValueError(f"backend {self.label!r}: health_path must begin with /, got {self.health_path!r}")
        if self.role not in ROLES:
            raise ValueError(f"backend {self.label!r}: role must be 'prefill' or left out, got {self.role!r}")
        if not all(self.models):
            raise ValueError(f"backend {self.label!r}: models must not hold an empty name")
        if self.api_key is not None and self.api_key_env is not None:
            raise ValueError(f"backend {self.label!r}: api_key and api_key_env exclude each other: leave one out")
        if self.key is not None and not self.key.isprintable():
            where = "api_key" if self.api_key_env is None else f"{self.api_key_env}, which api_key_env names,"
            raise ValueError(
                f"backend {self.label!r}: {where} has a line break or another character that cannot be sent"
            )
        if self.api_key_env is not None and not env.secret(self.api_key_env):
            raise ValueError(
                f"backend {self.label!r}: the environment has no {self.api_key_env}, which api_key_env names"
            )

    @property
    def label(self) -> str:
        return self.name or self.base

    @property
    def base(self) -> str:
        return self.url.rstrip("/")

    @property
    def key(self) -> str | None:
        return self.api_key if self.api_key_env is None else env.secret(self.api_key_env)


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """What a router is started with: backends, addresses, keys, limits.

    Args:
        backends: the backends, at least one.
        host, port: where to listen. By default only this machine can connect.
        ssl_certfile, ssl_keyfile: the files of the certificate and of its key, for TLS.
        api_keys: one of them must come as ``Authorization: Bearer``; none: the backends check keys.
        policy: how one of the backends that serve a model is chosen.
        sticky_chars: how many characters of a prompt's beginning place it (policy ``prefix``).
        sticky_header: a header that places a request instead.
        balance_epsilon: a backend takes no more by its prefix while its tokens in flight are above 1 + this times the
            mean of all.
        balance_min_tokens: tokens in flight below which a backend never counts as too full.
        prefill_min_tokens: how many tokens a prompt has at least that goes to a backend with the role ``prefill``
            first; 0: each does.
        max_retries: how many other backends a request may be sent to after the first one failed.
        retry_ratio, retry_reserve: retries of all requests together: this part of the requests, and this many more.
        connect_timeout, first_byte_timeout, between_bytes_timeout: seconds to wait for a backend.
        host_timeout: seconds without any sign of its host after which a connection ends.
        health_interval, health_timeout: seconds between probes, and for one.
        unhealthy_threshold, healthy_threshold: probes in a row that change a backend's state.
        failure_threshold: failed requests in a row that open a backend's circuit.
        backoff_seconds, max_backoff_seconds: how long it stays open; doubled each time, up to the latter.
        max_concurrency: how many requests may be answered at once.
        max_body_bytes: how many bytes the body of a request may have.
        max_header_bytes, max_header_count: how many bytes a request's line and headers may have together, and how many
            headers there may be.
        header_timeout: how long a client may take to send them, in seconds.
        max_held_bytes: how many bytes an answer may have that is held until it is whole.
        drain_seconds: how long running requests may take after SIGTERM.

    Raises:
        ValueError: a bad value; the message names the option.
    """

    backends: tuple[BackendConfig, ...]
    host: str = "127.0.0.1"
    port: int = 8080
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    api_keys: tuple[str, ...] = ()
    policy: str = "prefix"
    sticky_chars: int = 1024
    sticky_header: str = "x-session-id"
    balance_epsilon: float = 0.25
    balance_min_tokens: int = 8192
    prefill_min_tokens: int = 256
    max_retries: int = 2
    retry_ratio: float = 0.2
    retry_reserve: int = 10
    connect_timeout: float = 5.0
    first_byte_timeout: float = 600.0
    between_bytes_timeout: float = 120.0
    host_timeout: float = 30.0
    health_interval: float = 5.0
    health_timeout: float = 2.0
    unhealthy_threshold: int = 2
    healthy_threshold: int = 1
    failure_threshold: int = 5
    backoff_seconds: float = 1.0
    max_backoff_seconds: float = 60.0
    max_concurrency: int = 4096
    max_body_bytes: int = 16 << 20
    max_header_bytes: int = MAX_HEADER_BYTES
    max_header_count: int = MAX_HEADER_COUNT
    header_timeout: float = HEADER_TIMEOUT
    max_held_bytes: int = 64 << 20
    drain_seconds: float = 30.0

    def __post_init__(self) -> None:
        if not self.backends:
            raise ValueError("no backend: name at least one, as --backend http://127.0.0.1:8000")
        if all(backend.role == "prefill" for backend in self.backends):
            raise ValueError("all backends have the role 'prefill': leave it out of those that answer clients")
        for what, values in (
            ("name", [backend.label for backend in self.backends]),
            ("url", [backend.base for backend in self.backends]),
        ):
            for value in values:
                if values.count(value) > 1:
                    raise ValueError(f"two backends have the {what} {value!r}: each needs its own")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port must be from 0 to 65535, got {self.port}")
        if self.policy not in POLICIES:
            raise ValueError(f"policy must be one of {', '.join(POLICIES)}, got {self.policy!r}")
        if not all(self.api_keys):
            raise ValueError("api_keys must not hold an empty key: leave it out to let everybody ask")
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ValueError("ssl_certfile and ssl_keyfile need each other: give both, or none")
        for names, least in ((AT_LEAST_ONE, 1), (AT_LEAST_ZERO, 0)):
            for name in names:
                if not getattr(self, name) >= least:
                    raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        for name in MORE_THAN_ZERO:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be greater than 0, got {getattr(self, name)}")
        if not self.max_backoff_seconds >= self.backoff_seconds:
            raise ValueError(
                f"max_backoff_seconds must be at least backoff_seconds ({self.backoff_seconds}), got "
                f"{self.max_backoff_seconds}"
            )

    @property
    def head_limits(self) -> HeadLimits:
        return HeadLimits(self.max_header_bytes, self.max_header_count, self.header_timeout)


def default_keys() -> tuple[str, ...]:
    """What clients must send unless an option or a file says it."""
    return (env.API_KEY,) if env.API_KEY else ()


def read_config(path: Path, overrides: Mapping[str, Any]) -> RouterConfig:
    """The configuration in a TOML file: options at the top, and a table ``[[backends]]`` for each server.

    Args:
        overrides: options that win over those of the file.

    Raises:
        ValueError: the file is no TOML, or a key or value in it is bad; the message names both.
        OSError: it cannot be read.
    """
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # UnicodeDecodeError and TOMLDecodeError
        raise ValueError(f"{path} is not TOML: {error}") from error
    try:
        listed = found.pop("backends", [])
        if not isinstance(listed, list) or not all(isinstance(table, dict) for table in listed):
            raise ValueError("backends must be tables: write [[backends]] above each")
        backends = tuple(
            BackendConfig(**_checked(BackendConfig, table, f"[[backends]] {i + 1}: ")) for i, table in enumerate(listed)
        )
        options = {"api_keys": default_keys(), **_checked(RouterConfig, found, ""), **overrides}
        return RouterConfig(backends=backends, **options)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _checked(kind: type, table: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The table with lists as tuples.

    Raises:
        ValueError: a key that ``kind`` does not have, lacks, or of which the value has another type.
    """
    names = [field.name for field in dataclasses.fields(kind)]
    fields = {field.name: field for field in dataclasses.fields(kind) if field.name != "backends"}
    for name in table:
        if name not in fields:
            near = difflib.get_close_matches(name.replace("-", "_"), names, n=1)
            meant = f"did you mean {near[0]!r}? There" if near else "there"
            raise ValueError(f"{where}unknown key {name!r}: {meant} are {', '.join(names)}")
    for name, field in fields.items():
        if field.default is dataclasses.MISSING and name not in table:
            raise ValueError(f"{where}{name} is missing")
    return {name: _value(fields[name].type, value, where + name) for name, value in table.items()}


def _value(kind: Any, value: Any, name: str) -> Any:
    if kind == tuple[str, ...]:
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ValueError(f"{name} must be a list of strings, got {value!r}")
        return tuple(value)
    words = {int: "an integer", float: "a number", str: "a string"}
    wanted = str if kind == str | None else kind
    good = isinstance(value, int | float) if wanted is float else isinstance(value, wanted)
    if isinstance(value, bool) or not good:
        raise ValueError(f"{name} must be {words[wanted]}, got {value!r}")
    return value
