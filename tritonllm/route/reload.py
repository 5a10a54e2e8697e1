"""Read the configuration again when its file changes, or when SIGHUP comes."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from tritonllm.route.config import RouterConfig, read_config

logger = logging.getLogger(__name__)
LOOK_SECONDS = 1.0


class ConfigFile:
    """Args:
    path: of a TOML file.
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

    def reload(self) -> None:
        """Read it again even if it looks the same: a variable that it names may have changed."""
        self._asked.set()

    async def watch(self) -> None:
        """Until it is cancelled."""
        while True:
            try:
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._asked.wait()
            except TimeoutError:
                pass
            text = self._text()  # of what a link names now, as Kubernetes replaces a ConfigMap
            if self._asked.is_set() or (text != self._seen and text is not None):
                self._asked.clear()
                self._seen = text
                await self._read()

    async def _read(self) -> None:
        try:
            config = read_config(self._path, self._overrides)
        except (ValueError, OSError) as error:
            logger.error("the new configuration is refused, the old one stays: %s", error)
            self._tell("refused")
            return
        await self._apply(config)
        self._tell("done")

    def _text(self) -> bytes | None:
        try:
            return self._path.read_bytes()
        except OSError:
            return None  # it is being replaced
