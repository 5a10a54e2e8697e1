"""Read the configuration again when its file changes, or when SIGHUP comes."""

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from tritonllm.route.config import NEEDS_RESTART, RouterConfig, read_config

logger = logging.getLogger(__name__)
LOOK_SECONDS = 1.0
ABSENT_LOOKS = 2  # in a row without a file until it is gone, and not only being replaced


class ConfigFile:
    """A configuration file, which is read again when it changes or SIGHUP comes.

    Args:
        path: the path of a TOML file.
        overrides: options that win over those of the file, each time.
        apply: takes a new configuration.
        tell: learns of each attempt: "done" or "refused".
    """

    def __init__(
        self,
        path: Path,
        overrides: Mapping[str, Any],
        apply: Callable[[RouterConfig], Awaitable[None]],
        tell: Callable[[str], None],
    ) -> None:
        self._path, self._overrides, self._apply, self._tell = path, overrides, apply, tell
        self._asked = asyncio.Event()
        self._seen = self._text()
        self._absent = 0  # looks in a row that found no file

    def reload(self) -> None:
        """Read it again even if it looks the same: a variable that it names may have changed."""
        self._asked.set()

    async def watch(self) -> None:
        """Watch the file until the task is cancelled."""
        while True:
            try:
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._asked.wait()
            except TimeoutError:
                pass
            text = self._text()  # of what a link names now, as Kubernetes replaces a ConfigMap
            self._absent = self._absent + 1 if text is None else 0
            due = self._absent == ABSENT_LOOKS if text is None else text != self._seen
            if self._asked.is_set() or due:
                self._asked.clear()
                self._seen = text
                self._absent = 0 if text is not None else ABSENT_LOOKS  # it is said once
                await self._read()

    async def _read(self) -> None:
        try:
            config = read_config(self._path, self._overrides)
        except (ValueError, OSError) as error:
            why = f"{self._path}: {error.strerror}" if isinstance(error, OSError) else error
            logger.error("the new configuration is refused, the old one stays: %s", why)
            self._tell("refused")
            return
        try:
            await self._apply(config)
        except Exception:  # this watch has to outlive it, for the file that repairs it
            logger.exception("the new configuration is applied in part only: %s", self._path)
            self._tell("refused")
            return
        self._tell("done")

    def _text(self) -> bytes | None:
        try:
            return self._path.read_bytes()
        except OSError:
            return None  # it is being replaced


def changes(old: RouterConfig, new: RouterConfig) -> str:
    """What is another in the new configuration, in one line; of keys only that they changed."""
    before, after = ({backend.label: backend for backend in config.backends} for config in (old, new))
    changed = [
        name if name == "api_keys" else f"{name} ({getattr(old, name)} -> {getattr(new, name)})"
        for name in _different(old, new)
        if name not in ("backends", *NEEDS_RESTART)
    ]
    for label in before.keys() & after.keys():
        if names := _different(before[label], after[label]):
            changed.append(f"{label} ({', '.join(names)})")
    parts = {
        "backends added": [label for label in after if label not in before],
        "draining": [label for label in before if label not in after],
        "changed": sorted(changed),
    }
    return "; ".join(f"{what}: {', '.join(names)}" for what, names in parts.items() if names) or "nothing changed"


def _different(old: Any, new: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(old) if getattr(old, field.name) != getattr(new, field.name)]
