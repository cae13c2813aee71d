"""A small HTTP endpoint for machines that watch the daemon: /metrics, /livez and /readyz.

It is bound to the loopback interface only, answers GET and HEAD, takes no input but the path, and has threads of its
own: a few, so that a client that does not read cannot hold more than those. The event loop does not wait for it.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from engramd import __version__
from engramd.errors import EngramdError

THREADS = 4
CLIENT_TIMEOUT_S = 5.0  # for each read and write
STUCK_AFTER_S = 30.0  # an event loop that has not turned for so long is not alive
_LOG = logging.getLogger("engramd")


class Health:
    """What the event loop says about itself. Written by the loop's thread, read by any."""

    def __init__(self) -> None:
        self.turned_at = time.monotonic()
        self.is_ready = False

    def problem(self) -> str | None:
        """Why the daemon is not alive, or None."""
        silent_s = time.monotonic() - self.turned_at
        return f"the event loop has not turned for {silent_s:.0f} s" if silent_s > STUCK_AFTER_S else None


class HttpEndpoint:
    """Serves `host:port` from threads of its own until `close`. Raises EngramdError where it cannot be bound."""

    def __init__(self, address: str, metrics: Callable[[], str], content_type: str, health: Health) -> None:
        host, _, port = address.rpartition(":")
        host = host.strip("[]")

        class Handler(_Handler):
            pages = _Pages(metrics, content_type, health)

        class Server(HTTPServer):
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
            request_queue_size = 16

            def handle_error(self, request: Any, client_address: Any) -> None:
                _LOG.debug("a request for metrics from %s failed", client_address, exc_info=True)

            def server_bind(self) -> None:
                # HTTPServer's own looks the host's name up, which can take long.
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                self.socket.bind(self.server_address)
                self.server_name, self.server_port = host, int(port)

        try:
            self._server = Server((host, int(port)), Handler)
        except OSError as error:
            raise EngramdError(f"metrics {address}: cannot be bound: {error.strerror}") from None
        self._is_closing = False
        self._threads = [
            threading.Thread(target=self._run, name=f"metrics-{number}", daemon=True) for number in range(THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        # Several threads in accept(): the kernel gives each connection to one of them.
        while not self._is_closing:
            self._server.handle_request()

    def close(self) -> None:
        """Stops listening. Replies that are being written end with the process."""
        self._is_closing = True
        self._server.socket.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(CLIENT_TIMEOUT_S)
        self._server.server_close()


class _Pages:
    def __init__(self, metrics: Callable[[], str], content_type: str, health: Health) -> None:
        self._metrics = metrics
        self._content_type = content_type
        self._health = health

    def get(self, path: str) -> tuple[int, str, str]:
        """(status, content type, text) of a path."""
        plain = "text/plain; charset=utf-8"
        if path == "/metrics":
            return HTTPStatus.OK, self._content_type, self._metrics()
        problem = self._health.problem()
        if path == "/readyz" and problem is None and not self._health.is_ready:
            problem = "not serving"
        if path in ("/livez", "/readyz"):
            status = HTTPStatus.SERVICE_UNAVAILABLE if problem else HTTPStatus.OK
            return status, plain, f"{problem or 'ok'}\n"
        return HTTPStatus.NOT_FOUND, plain, "there is /metrics, /livez and /readyz\n"


class _Handler(BaseHTTPRequestHandler):
    pages: _Pages
    server_version = f"engramd/{__version__}"
    sys_version = ""
    timeout = CLIENT_TIMEOUT_S

    def do_GET(self) -> None:
        try:
            status, content_type, text = self.pages.get(self.path.partition("?")[0])
        except Exception:  # noqa: BLE001 - whatever it is, the scraper gets an answer and the log the trace
            _LOG.exception("metrics cannot be given")
            status, content_type, text = HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain", "see the daemon's log\n"
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, format: str, *arguments: Any) -> None:
        _LOG.debug("metrics: " + format, *arguments)
