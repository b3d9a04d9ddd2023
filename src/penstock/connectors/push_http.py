"""The receiver of ``ps.http_push``: a small server of the standard library, on a thread for each connection.

It says 200 late, never early: the handler waits until the spool has made the records durable. Everything is bounded:
the body, the connections, the time a sender may take, the backlog.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import socket
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

import polars as pl

from penstock.connectors.push import PushSource, json_lines, parse_records
from penstock.connectors.spool import Batch, SpoolClosed, SpoolFull
from penstock.errors import PenstockError, SourceError

CONNECTIONS_MAX: Final = 64
ANSWER_S: Final = 60.0
"""Longer than this no sender is kept waiting for the store."""
READ_S: Final = 30.0
KEY_CHARS_MAX: Final = 200


class HttpSource(PushSource):
    """See ``penstock.http_push``. ``address`` is where it listens, once the job has opened it."""

    linger_s = 0.002

    def __init__(
        self,
        host: str,
        port: int,
        path: str,
        token: str | None,
        format: str,
        schema: pl.Schema,
        body_bytes_max: int,
        rows_max: int,
        bytes_max: int,
    ) -> None:
        super().__init__(schema, rows_max, bytes_max)
        self.host, self.port, self.path, self.token = host, port, path, token
        self.format, self.body_bytes_max = format, body_bytes_max
        self.answer_s = ANSWER_S
        self.opened = threading.Event()
        """Set while senders are served."""
        self.address: str | None = None
        self._server: _Server | None = None

    def describe(self) -> str:
        return f"HTTP push on {getattr(self, 'host', '')}:{getattr(self, 'port', '')}{getattr(self, 'path', '')}"

    def _start(self, source_id: str) -> None:
        try:
            self._server = _Server(self)
        except OSError as error:
            self.spool.close()
            raise SourceError(
                f"source '{source_id}' cannot listen on {self.host}:{self.port}: {error.strerror or error}.",
                remedy="Another process has the port: end it, or choose another port."
                if error.errno == errno.EADDRINUSE
                else "Choose an address of this machine, and a port this user may listen on.",
                host=self.host,
                port=self.port,
            ) from error
        host = f"[{self.host}]" if ":" in self.host else self.host
        self.address = f"http://{host}:{self._server.server_address[1]}{self.path}"
        threading.Thread(target=self._server.serve, name=f"penstock-http: {source_id}", daemon=True).start()
        self.opened.set()

    def _stop(self) -> None:
        self.opened.clear()
        server, self._server = self._server, None
        if server is not None:
            server.stop()

    def close(self) -> None:
        super().close()
        self.address = None

    # ------------------------------------------------------------ one request

    def take(self, body: bytes, is_document: bool, key: str | None) -> tuple[HTTPStatus, dict[str, Any]]:
        """What to answer."""
        if is_document and self.format == "jsonl":
            try:
                body = json_lines(body)
            except ValueError as error:
                return HTTPStatus.BAD_REQUEST, {"error": f"not a JSON document: {error}"}
        frame, bad = parse_records(body, self.format, self._schema)
        said = {"rows": frame.height, "bad": len(bad)}
        if not frame.height and not bad:
            return HTTPStatus.OK, said
        try:
            batch = self.spool.append(Batch(frame, bad, key), wait=False)
        except SpoolFull:
            return HTTPStatus.TOO_MANY_REQUESTS, {"error": "the flow is behind; send again later"}
        except SpoolClosed:
            return HTTPStatus.SERVICE_UNAVAILABLE, {"error": "the job ends; send again later"}
        except PenstockError as error:
            return HTTPStatus.SERVICE_UNAVAILABLE, {"error": error.message}
        if not batch.done.wait(self.answer_s):
            return HTTPStatus.SERVICE_UNAVAILABLE, {"error": "not kept yet; send again with the same Idempotency-Key"}
        if batch.error is not None:
            return HTTPStatus.SERVICE_UNAVAILABLE, {"error": "not kept; send again later"}
        return HTTPStatus.OK, {**said, "repeated": True} if batch.repeated else said


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, source: HttpSource) -> None:
        self.source = source
        self.address_family = socket.AF_INET6 if ":" in source.host else socket.AF_INET
        self._slots = threading.BoundedSemaphore(CONNECTIONS_MAX)
        self._connections: set[Any] = set()
        self._lock = threading.Lock()
        super().__init__((source.host, source.port), _Handler)

    def serve(self) -> None:
        self.serve_forever(poll_interval=0.1)

    def stop(self) -> None:
        self.shutdown()
        self.server_close()
        self.source._closing.set()
        with self._lock:
            connections = list(self._connections)
        for each in connections:  # those that wait for a next request; an answer under way is still written
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RD)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._slots.acquire(blocking=False):
            self.shutdown_request(request)  # the sender tries again
            return
        with self._lock:
            self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            ours = request in self._connections
            self._connections.discard(request)
        if ours:
            self._slots.release()
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A sender that hung up is nothing to print a trace for."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = READ_S
    server: _Server

    def log_message(self, format: str, *args: Any) -> None:
        """Penstock prints what its user asked for, and nothing else."""

    def version_string(self) -> str:
        return "penstock"

    def do_POST(self) -> None:
        source = self.server.source
        if self.path.partition("?")[0] != source.path:
            self._answer(HTTPStatus.NOT_FOUND, {"error": f"records go to {source.path}"}, keep=False)
            return
        if source.token is not None:
            given = self.headers.get("Authorization", "")
            if not hmac.compare_digest(given.encode(), f"Bearer {source.token}".encode()):
                self._answer(HTTPStatus.UNAUTHORIZED, {"error": "Authorization: Bearer <token> is needed"}, keep=False)
                return
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal():
            self._answer(HTTPStatus.LENGTH_REQUIRED, {"error": "Content-Length is needed"}, keep=False)
            return
        if int(length) > source.body_bytes_max:
            said = {"error": f"more than {source.body_bytes_max} bytes; send less at a time"}
            self._answer(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, said, keep=False)
            return
        key = self.headers.get("Idempotency-Key")
        if key is not None and not 0 < len(key) <= KEY_CHARS_MAX:
            said = {"error": f"an Idempotency-Key has 1 to {KEY_CHARS_MAX} characters"}
            self._answer(HTTPStatus.BAD_REQUEST, said, keep=False)
            return
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            self.close_connection = True  # the sender is gone, and half of a request is none
            return
        kind = self.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        self._answer(*source.take(body, kind == "application/json", key))

    def do_GET(self) -> None:
        self._answer(HTTPStatus.METHOD_NOT_ALLOWED, {"error": "POST records here"}, keep=False)

    do_PUT = do_DELETE = do_HEAD = do_GET

    def _answer(self, status: HTTPStatus, said: dict[str, Any], *, keep: bool = True) -> None:
        """``keep=False``: the body was not read, so the connection cannot be used again."""
        data = json.dumps(said).encode()
        if not keep or self.server.source._closing.is_set():
            self.close_connection = True
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
            self.send_header("Retry-After", "1")
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


__all__ = ["HttpSource"]
