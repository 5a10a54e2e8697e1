"""A TCP proxy on this machine that does one kind of harm to the bytes which a server sends."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from support.waiting import PATIENCE


class FaultProxy:
    """In front of ``127.0.0.1:port``; listens at ``self.port`` of the same address.

    Args:
        port: of the server.
        kind: ``cut`` hangs up before byte ``at`` of a connection's answers, ``stall`` sends nothing from there on,
            ``drop`` leaves that byte out, ``flip`` changes it, ``double`` sends it twice, ``refuse`` hangs up on
            everybody at once; ``None`` does no harm.
    """

    def __init__(self, port: int, kind: str | None = None, at: int = 0) -> None:
        self.kind, self.at = kind, at
        self.connections = 0
        self._to = port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self._ends: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._threads[0].join(PATIENCE)
        for end in self._ends:
            _hang_up(end)
        for thread in self._threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()
        for end in self._ends:
            end.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            self.connections += 1
            if self.kind == "refuse":
                client.close()
                continue
            server = socket.create_connection(("127.0.0.1", self._to))
            self._ends += [client, server]
            for work, ends in ((self._forward, (client, server)), (self._harm, (server, client))):
                thread = threading.Thread(target=work, args=ends)
                self._threads.append(thread)
                thread.start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        _hang_up(sink)

    def _harm(self, source: socket.socket, sink: socket.socket) -> None:
        begin, silent = 0, False
        with suppress(OSError):
            while data := source.recv(1 << 16):
                at = self.at - begin
                if 0 <= at < len(data):
                    silent = silent or self.kind == "stall"
                    sent, ends = self._harmed(data, at)
                    sink.sendall(sent)
                    if ends:
                        break
                elif not silent:
                    sink.sendall(data)
                begin += len(data)
        _hang_up(sink)
        _hang_up(source)

    def _harmed(self, data: bytes, at: int) -> tuple[bytes, bool]:
        """What is sent in place of these bytes, and whether that is all."""
        before, one, after = data[:at], data[at : at + 1], data[at + 1 :]
        if self.kind in ("cut", "stall"):
            return before, self.kind == "cut"
        changed = {"drop": b"", "flip": bytes([one[0] ^ 4]), "double": 2 * one}.get(self.kind or "", one)
        return before + changed + after, False


def _hang_up(end: socket.socket) -> None:
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)


@contextmanager
def fault_proxy(port: int, kind: str | None = None, at: int = 0) -> Iterator[FaultProxy]:
    proxy = FaultProxy(port, kind, at)
    try:
        yield proxy
    finally:
        proxy.close()
