"""The official clients, unmodified, before a server that sends them recorded bytes."""

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import anthropic
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
def _server_of(body: bytes) -> Iterator[str]:
    handler = type("Handler", (_Handler,), {"body": body})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def client_of(body: bytes) -> Iterator[openai.OpenAI]:
    """A client to whom every request is answered with this stream of events."""
    with _server_of(body) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
        yield client


@contextmanager
def anthropic_client_of(body: bytes) -> Iterator[anthropic.Anthropic]:
    """The same, of the other API."""
    with _server_of(body) as url, anthropic.Anthropic(base_url=url, api_key="x", max_retries=0) as client:
        yield client
