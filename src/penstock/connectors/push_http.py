"""The receiver of ``ps.http_push``: a small HTTP/1.1 server in one thread, and a thread for each answer under way.

It says 200 late, never early: the answer waits until the spool has made the records durable.

Everything that a sender may do is bounded, so that no sender keeps the others out:

* the whole head of a request must be there within a deadline, and so must its whole body, however the bytes drip;
* connections are limited, in all and for each peer. At the limit the newest is let in, and one that has not sent its
  request goes: the oldest of the peer that has the most;
* heads, headers, chunks and bodies have a greatest size, and so have all bodies under way together. Lengths are
  compared before anything is read.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import json
import re
import socket
import threading
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final

import polars as pl

from penstock.connectors.push import PushSource, json_lines, parse_records
from penstock.connectors.spool import Batch, SpoolClosed, SpoolFull
from penstock.errors import PenstockError, SourceError

CONNECTIONS_MAX: Final = 256
PEER_CONNECTIONS_MAX: Final = 128
"""Connections of one address: a peer that opens more gets the new ones for its oldest."""
ANSWER_S: Final = 60.0
"""The longest that a sender is kept waiting for the store."""
HEAD_S: Final = 10.0
"""The time for the whole head of a request, from its first byte, or from the connection on."""
IDLE_S: Final = 30.0
"""The time until the next request of a connection begins."""
BODY_S: Final = 15.0
"""The time for a body, besides what its length takes at ``BODY_BYTES_PER_S``."""
BODY_BYTES_PER_S: Final = 256 << 10
CLOSE_S: Final = 2.0
"""The time for a sender to take an answer, and to read it before the connection is reset."""
HEAD_BYTES_MAX: Final = 16 << 10
HEADERS_MAX: Final = 100
BODIES_BYTES_MAX: Final = 64 << 20
"""Bytes of all bodies that are being received, if ``body_bytes_max`` is not greater."""
KEY_CHARS_MAX: Final = 200
READ_BYTES: Final = 64 << 10

_REQUEST: Final = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+) ([\x21-\x7e]+) HTTP/1\.([01])")
_HEADER: Final = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\x00\r\n]*)")
_CHUNK: Final = re.compile(rb"([0-9A-Fa-f]{1,8})[ \t]*(?:;[^\r\n]*)?\r\n")


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
        self.answer_s, self.head_s, self.idle_s, self.body_s = ANSWER_S, HEAD_S, IDLE_S, BODY_S
        self.connections_max, self.peer_connections_max = CONNECTIONS_MAX, PEER_CONNECTIONS_MAX
        self.bodies_bytes_max = max(BODIES_BYTES_MAX, body_bytes_max)
        self.opened = threading.Event()
        """Set while senders are served."""
        self.address: str | None = None
        self._server: _Server | None = None

    def describe(self) -> str:
        return f"HTTP push on {getattr(self, 'host', '')}:{getattr(self, 'port', '')}{getattr(self, 'path', '')}"

    def _start(self, source_id: str) -> None:
        try:
            family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
            listener = socket.create_server((self.host, self.port), family=family, backlog=CONNECTIONS_MAX)
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
        self.address = f"http://{host}:{listener.getsockname()[1]}{self.path}"
        self._server = _Server(self, listener, source_id)
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
        """What to answer. Waits until the records are durable."""
        if is_document and self.format == "jsonl":
            try:
                body = json_lines(body)
            except RecursionError:
                return HTTPStatus.BAD_REQUEST, {"error": "not a JSON document: it is nested too deep"}
            except ValueError as error:
                return HTTPStatus.BAD_REQUEST, {"error": f"not a JSON document: {str(error)[:200]}"}
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


class _Refused(Exception):
    """A request that is answered without its body having been read to the end: the connection cannot go on."""

    def __init__(self, status: HTTPStatus, error: str) -> None:
        super().__init__(error)
        self.status = status
        self.error = error


@dataclass(frozen=True)
class _Head:
    method: str
    target: str
    keep: bool
    """May another request follow on this connection?"""
    headers: Mapping[str, list[str]]

    def get(self, name: str) -> str | None:
        """The header's only value."""
        values = self.headers.get(name, [])
        if len(set(values)) > 1:
            raise _Refused(HTTPStatus.BAD_REQUEST, f"{name} is given twice")
        return values[0] if values else None


@dataclass(eq=False)
class _Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    peer: str
    doing: str = "head"
    """``head`` until a whole head is there, ``body`` while a body comes, then ``answer``; ``close`` after a refusal."""
    served: bool = False
    """It has had an answer already."""
    bodyless: bool = False
    """It asked with HEAD: an answer has no body."""
    held: int = 0
    """Bytes of its body that are in memory."""
    task: asyncio.Task[None] | None = field(default=None, repr=False)


class _Server:
    """Listens until ``stop``. An event loop in one thread does everything but the answers."""

    def __init__(self, source: HttpSource, listener: socket.socket, source_id: str) -> None:
        self.source = source
        self.connections: dict[_Connection, None] = {}
        """Those that are open, oldest first."""
        self._listener = listener
        self._answers = ThreadPoolExecutor(source.connections_max, thread_name_prefix="penstock-http-answer")
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(lambda loop, context: None)  # Penstock prints what its user asked for
        self._over = asyncio.Event()
        self._closed = threading.Event()
        """Nobody is listening any more."""
        self._thread = threading.Thread(target=self._run, name=f"penstock-http: {source_id}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Take no more requests. Answers under way are still written."""
        self.source._closing.set()
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._over.set)
        self._closed.wait(CLOSE_S)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._listener.close()
            self._closed.set()
            self._answers.shutdown(wait=False)
            self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._accept, sock=self._listener, limit=HEAD_BYTES_MAX)
        await self._over.wait()
        server.close()
        self._listener.close()
        self._closed.set()
        tasks = {c.task for c in self.connections if c.task is not None}
        for connection in list(self.connections):
            if connection.doing != "answer" and connection.task is not None:
                connection.task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=self.source.answer_s)

    # -- who may stay --------------------------------------------------------------------------------------------

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        name = writer.get_extra_info("peername")
        connection = _Connection(reader, writer, str(name[0]) if name else "")
        connection.task = asyncio.current_task()
        peers = Counter(c.peer for c in self.connections)
        room = True
        if peers[connection.peer] >= self.source.peer_connections_max:
            room = self._send_away({connection.peer: 1})
        elif len(self.connections) >= self.source.connections_max:
            room = self._send_away(peers)
        self.connections[connection] = None
        try:
            if not room:
                raise _Refused(HTTPStatus.SERVICE_UNAVAILABLE, "too many requests at once; send again later")
            while await self._request(connection):
                connection.doing, connection.served = "head", True
        except _Refused as refused:
            await self._answer(connection, refused.status, {"error": refused.error}, keep=False)
            await self._linger(connection)
        except (TimeoutError, asyncio.IncompleteReadError, OSError):
            pass  # the sender is gone, or takes no answer
        except asyncio.CancelledError:
            if not self._over.is_set():
                writer.transport.abort()  # it made room for another
        finally:
            self.connections.pop(connection, None)
            writer.close()

    def _send_away(self, peers: Mapping[str, int], doing: str = "head") -> bool:
        """Close the oldest connection of the peer that has the most; False when all of them are being answered."""
        candidates = [c for c in self.connections if c.peer in peers and c.doing != "answer"]
        candidates = [c for c in candidates if c.doing == doing] or candidates
        if not candidates:
            return False
        victim = max(candidates, key=lambda c: peers[c.peer])  # the first of equals is the oldest
        self.connections.pop(victim)
        assert victim.task is not None
        victim.task.cancel()
        return True

    # -- one request ---------------------------------------------------------------------------------------------

    async def _request(self, connection: _Connection) -> bool:
        """Read and answer one request. False when no other can follow."""
        head = await self._head(connection)
        source = self.source
        connection.bodyless = head.method == "HEAD"
        if head.target.partition("?")[0] != source.path:
            raise _Refused(HTTPStatus.NOT_FOUND, f"records go to {source.path}")
        if head.method != "POST":
            raise _Refused(HTTPStatus.METHOD_NOT_ALLOWED, "POST records here")
        if source.token is not None:
            given = (head.get("authorization") or "").encode()
            if not hmac.compare_digest(given, f"Bearer {source.token}".encode()):
                raise _Refused(HTTPStatus.UNAUTHORIZED, "Authorization: Bearer <token> is needed")
        key = head.get("idempotency-key")
        if key is not None and not 0 < len(key) <= KEY_CHARS_MAX:
            raise _Refused(HTTPStatus.BAD_REQUEST, f"an Idempotency-Key has 1 to {KEY_CHARS_MAX} characters")
        if (head.get("content-encoding") or "identity").lower() != "identity":
            raise _Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "send the body as it is, without Content-Encoding")
        length = self._length(head)
        connection.doing = "body"
        if (head.get("expect") or "").lower() == "100-continue":
            connection.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        expected = source.body_bytes_max if length is None else length
        try:
            async with asyncio.timeout(source.body_s + expected / BODY_BYTES_PER_S):
                body = await (self._chunked(connection) if length is None else self._plain(connection, length))
        except TimeoutError:
            raise _Refused(HTTPStatus.REQUEST_TIMEOUT, "the body took too long") from None
        finally:
            connection.held = 0
        connection.doing = "answer"
        kind = (head.get("content-type") or "").partition(";")[0].strip().lower()
        answer = self._loop.run_in_executor(self._answers, source.take, body, kind == "application/json", key)
        del body
        try:
            status, said = await answer
        except Exception as error:  # the sender must hear something, and the server goes on
            status, said = HTTPStatus.INTERNAL_SERVER_ERROR, {"error": f"{type(error).__name__}: {error}"[:200]}
        return await self._answer(connection, status, said, keep=head.keep)

    async def _head(self, connection: _Connection) -> _Head:
        reader, source = connection.reader, self.source
        try:
            async with asyncio.timeout(source.idle_s if connection.served else source.head_s):
                began = await reader.readexactly(1)
            async with asyncio.timeout(source.head_s):
                data = began + await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            error = f"the head of a request has at most {HEAD_BYTES_MAX} bytes"
            raise _Refused(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, error) from None
        except TimeoutError:
            raise _Refused(HTTPStatus.REQUEST_TIMEOUT, "the request took too long") from None
        return _parse_head(data)

    def _length(self, head: _Head) -> int | None:
        """The length of the body, None when it comes in chunks."""
        encoding, length = head.get("transfer-encoding"), head.get("content-length")
        if encoding is not None:
            if length is not None:
                raise _Refused(HTTPStatus.BAD_REQUEST, "Content-Length and Transfer-Encoding contradict each other")
            if encoding.lower() != "chunked":
                raise _Refused(HTTPStatus.NOT_IMPLEMENTED, "of the transfer encodings only chunked is known")
            return None
        if length is None:
            raise _Refused(HTTPStatus.LENGTH_REQUIRED, "Content-Length is needed, or chunks")
        if not (length.isascii() and length.isdecimal()):
            raise _Refused(HTTPStatus.BAD_REQUEST, "Content-Length is no number")
        if len(length) > 18 or int(length) > self.source.body_bytes_max:
            raise self._too_long()
        return int(length)

    def _too_long(self) -> _Refused:
        error = f"more than {self.source.body_bytes_max} bytes; send less at a time"
        return _Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, error)

    async def _plain(self, connection: _Connection, length: int) -> bytes:
        body = bytearray()
        while len(body) < length:
            body += await self._some(connection, length - len(body))
        return bytes(body)

    async def _chunked(self, connection: _Connection) -> bytes:
        body = bytearray()
        while True:
            found = _CHUNK.fullmatch(await self._line(connection))
            if found is None:
                raise _Refused(HTTPStatus.BAD_REQUEST, "a chunk begins with its length in hexadecimal digits")
            size = int(found[1], 16)
            if len(body) + size > self.source.body_bytes_max:
                raise self._too_long()
            if size == 0:
                break
            end = len(body) + size
            while len(body) < end:
                body += await self._some(connection, end - len(body))
            if await connection.reader.readexactly(2) != b"\r\n":
                raise _Refused(HTTPStatus.BAD_REQUEST, "a chunk is not as long as it says")
        for _ in range(HEADERS_MAX):
            if await self._line(connection) == b"\r\n":
                return bytes(body)
        raise _Refused(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"more than {HEADERS_MAX} trailers")

    async def _line(self, connection: _Connection) -> bytes:
        try:
            return await connection.reader.readuntil(b"\r\n")
        except asyncio.LimitOverrunError:
            raise _Refused(HTTPStatus.BAD_REQUEST, "a line between chunks is too long") from None

    async def _some(self, connection: _Connection, at_most: int) -> bytes:
        data = await connection.reader.read(min(READ_BYTES, at_most))
        if not data:
            raise asyncio.IncompleteReadError(b"", at_most)  # half of a request is none
        connection.held += len(data)
        while sum(c.held for c in self.connections) > self.source.bodies_bytes_max:
            others: Counter[str] = Counter()
            for each in self.connections:
                others[each.peer] += each.held * (each is not connection)
            others = +others
            if not others or not self._send_away(others, "body"):
                raise _Refused(HTTPStatus.SERVICE_UNAVAILABLE, "too many bodies at once; send again later")
        return data

    # -- answers -------------------------------------------------------------------------------------------------

    async def _answer(
        self, connection: _Connection, status: HTTPStatus, said: dict[str, Any], *, keep: bool = True
    ) -> bool:
        connection.doing = "answer"
        keep = keep and not self.source._closing.is_set()
        data = json.dumps(said).encode()
        lines = [
            f"HTTP/1.1 {status.value} {status.phrase}",
            "Server: penstock",
            "Content-Type: application/json",
            f"Content-Length: {len(data)}",
        ]
        if status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
            lines.append("Retry-After: 1")
        if status == HTTPStatus.METHOD_NOT_ALLOWED:
            lines.append("Allow: POST")
        lines.append("Connection: keep-alive" if keep else "Connection: close")
        connection.writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + data * (not connection.bodyless))
        async with asyncio.timeout(CLOSE_S):
            await connection.writer.drain()
        return keep

    async def _linger(self, connection: _Connection) -> None:
        """Read on for a moment: a connection that is closed with bytes unread is reset, and the answer lost."""
        connection.doing = "close"
        with contextlib.suppress(TimeoutError, OSError):
            connection.writer.write_eof()
            async with asyncio.timeout(CLOSE_S):
                left = HEAD_BYTES_MAX * 64
                while left > 0 and (data := await connection.reader.read(READ_BYTES)):
                    left -= len(data)


def _parse_head(data: bytes) -> _Head:
    lines = data.lstrip(b"\r\n").removesuffix(b"\r\n\r\n").split(b"\r\n")
    request = _REQUEST.fullmatch(lines[0])
    if request is None:
        raise _Refused(HTTPStatus.BAD_REQUEST, "this is no HTTP/1.1 request")
    if len(lines) - 1 > HEADERS_MAX:
        raise _Refused(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"more than {HEADERS_MAX} headers")
    headers: dict[str, list[str]] = {}
    for line in lines[1:]:
        found = _HEADER.fullmatch(line)
        if found is None:
            raise _Refused(HTTPStatus.BAD_REQUEST, "a header is no name, a colon and a value")
        headers.setdefault(found[1].decode().lower(), []).append(found[2].decode("latin-1").strip())
    wishes = ",".join(headers.get("connection", [])).lower()
    keep = "close" not in wishes if request[3] == b"1" else "keep-alive" in wishes
    return _Head(request[1].decode(), request[2].decode(), keep, headers)


__all__ = ["HttpSource"]
