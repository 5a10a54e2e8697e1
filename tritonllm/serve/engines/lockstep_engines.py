"""The engines that share experts with one, seen from its process (:mod:`tritonllm.engine.ranks.shared_experts`)."""

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import zmq

from tritonllm.dist.lockstep import Lockstep
from tritonllm.dist.watch import TICK
from tritonllm.engine.loop.engine import LLMEngine

logger = logging.getLogger(__name__)


class LockstepEngines:
    """The engines that share experts with this one, while it has no request.

    Args:
        engine: the engine of this process.
        lockstep: the lockstep of this engine, in which the others wait for it.
        socket: the socket on which the engine's messages come.
    """

    def __init__(self, engine: LLMEngine, lockstep: Lockstep, socket: Any) -> None:
        self._engine, self._lockstep, self._socket = engine, lockstep, socket
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(lockstep.bell, zmq.POLLIN)
        self._joined = False  # there was a step just now, and another will follow

    def await_work(self, longest: float | None = None) -> None:
        """Wait until a message has come, or another engine waits in a step, which this one joins.

        Args:
            longest: seconds after which there is something else to look at; ``None`` if there is nothing.

        Raises:
            LeftError, LockstepError: another did not come to that step.
        """
        until = time.monotonic() + (self._lockstep.spin if self._joined else 0.0)
        while not self._lockstep.is_behind:
            if self._socket.poll(0):
                return
            if time.monotonic() > until:
                self._joined = False
                if not self._poller.poll(None if longest is None else int(1000 * longest)):
                    return
                self._lockstep.hush()
            else:
                os.sched_yield()
        self._engine.join()
        self._joined = True


def end_if_silent(lockstep: Lockstep, patience: float, tell: Callable[[str], None]) -> None:
    """End this process once another engine gives no sign of life (it was stopped, say, or its interpreter hangs): this
    one may wait for it on the device, where nothing else ends that.

    Args:
        patience: seconds that another may be silent.
        tell: is given the reason.
    """

    def watch() -> None:
        while True:
            silent = lockstep.beat(TICK)
            if any(seconds > patience for seconds in silent.values()):
                other = max(silent, key=silent.__getitem__)
                why = f"replica {other} has given no sign of life for {patience:g} s, and shares experts with this one"
                logger.error("%s", why)
                try:
                    tell(why)
                finally:
                    os._exit(1)
            time.sleep(TICK)

    threading.Thread(target=watch, name="tritonllm-lockstep", daemon=True).start()
