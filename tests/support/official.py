"""The official `openai` client, unmodified, before a server that sends it recorded bytes."""

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import openai


class _Handler(BaseHTTPRequestHandler):
    body = b""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@contextmanager
def client_of(body: bytes) -> Iterator[openai.OpenAI]:
    """A client to whom every request is answered with this stream of events."""
    handler = type("Handler", (_Handler,), {"body": body})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        base = f"http://127.0.0.1:{server.server_address[1]}/v1"
        try:
            with openai.OpenAI(base_url=base, api_key="x", max_retries=0) as client:
                yield client
        finally:
            server.shutdown()
            thread.join()
