"""A server that answers what a test wants, also what no real one should."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread


@contextmanager
def fake_server(answers: dict[str, Sequence[tuple[int, Sequence[bytes]]]]) -> Iterator[str]:
    """Its address.

    Args:
        answers: for each path the status and the pieces of the body of its first answer, its second and so on; the
            last one is given again and again. Other paths are not found.
    """
    given = dict.fromkeys(answers, 0)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            known = answers.get(self.path, [(404, [b"no such path: " + self.path.encode()])])
            status, pieces = known[min(given.get(self.path, 0), len(known) - 1)]
            given[self.path] = given.get(self.path, 0) + 1
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            for piece in pieces:
                self.wfile.write(piece)
                self.wfile.flush()

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
