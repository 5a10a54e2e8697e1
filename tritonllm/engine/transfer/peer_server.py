"""Answers other engines that ask for blocks (:mod:`tritonllm.engine.transfer.wire`) from those kept in memory. No
torch.

One thread takes connections and one serves each of them, at most ``MOST_CONNECTIONS``; who comes then is hung up on,
and so is whoever is silent for long, reads too slowly or sends what is no question. Nobody's question holds up the
engine.
"""

import logging
import socket
import threading
import time
from contextlib import suppress

from tritonllm.engine.transfer.kept import KeptBlocks
from tritonllm.engine.transfer.plane import QUICK, Plane
from tritonllm.engine.transfer.wire import Channel, Kind, Question, WireError, count_frame

logger = logging.getLogger(__name__)
MOST_CONNECTIONS = 64
IDLE = 60.0  # seconds that a connection is kept between questions
LONGEST_WAIT = 60.0  # seconds that a question may wait for blocks


class PeerServer:
    """Listens at once; answers after :meth:`start`.

    Args:
        kept: what there is.
        plane: how blocks go to who asks for them.
        host, port: where to listen; port 0 takes a free one.

    Attributes:
        port: where it listens.

    Raises:
        OSError: it cannot listen there.
    """

    def __init__(self, kept: KeptBlocks, plane: Plane, host: str, port: int) -> None:
        self._kept, self._plane = kept, plane
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        self._listening = socket.create_server(address[:2], family=family)
        self.port: int = self._listening.getsockname()[1]
        self._lock = threading.Lock()
        self._served: dict[Channel, threading.Thread] = {}
        self._closed = False
        self._accepting = threading.Thread(target=self._accept, name="kv-peer-accept", daemon=True)

    def start(self) -> None:
        self._accepting.start()

    def close(self, seconds: float) -> None:
        """Hang up on everybody, and wait for the threads, so long at most."""
        until = time.monotonic() + seconds
        with self._lock:
            self._closed = True
            served = list(self._served.items())
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # closing it alone would not wake the thread
        self._listening.close()
        for channel, _ in served:
            channel.close()
        threads = [thread for _, thread in served] + ([self._accepting] if self._accepting.ident else [])
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _accept(self) -> None:
        while not self._closed:
            try:
                connected, _ = self._listening.accept()
            except OSError as error:  # closed; or there are too many open files
                if not self._closed:
                    logger.warning("a peer cannot connect: %s", error)
                    time.sleep(0.1)
                continue
            try:
                self._begin(Channel(connected))
            except (OSError, RuntimeError) as error:  # it has left already; no more threads
                connected.close()
                logger.warning("a peer cannot be served: %s", error)

    def _begin(self, channel: Channel) -> None:
        thread = threading.Thread(target=self._serve, args=(channel,), name="kv-peer-serve", daemon=True)
        with self._lock:
            refused = self._closed or len(self._served) >= MOST_CONNECTIONS
            if not refused:
                self._served[channel] = thread  # first: it may have answered by the time that start() returns
                try:
                    thread.start()
                except RuntimeError:
                    del self._served[channel]
                    raise
        if refused:
            channel.close()

    def _serve(self, channel: Channel) -> None:
        try:
            while not self._closed:
                kinds = (Kind.LOOKUP, *self._plane.questions)
                self._answer(channel, channel.read_question(kinds, time.monotonic() + IDLE, QUICK))
        except OSError as error:  # it has hung up, mostly
            logger.debug("a peer is served no more: %s", error)
        except WireError as error:
            logger.warning("a peer is hung up on: %s", error)
        finally:
            with self._lock:  # first, so that who sees the connection end can have another
                self._served.pop(channel, None)
            channel.close()

    def _answer(self, channel: Channel, asked: Question) -> None:
        until = time.monotonic() + min(asked.wait, LONGEST_WAIT)
        if asked.kind is Kind.LOOKUP:
            channel.send(count_frame(self._kept.count(asked.keys, until)), time.monotonic() + QUICK)
        else:
            self._plane.answer(channel, asked, self._kept, until)
