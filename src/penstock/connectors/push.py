"""Sources that cannot be asked again: a user's iterator, a socket, records that others POST to us.

A thread of the driver takes what arrives and hands it to the *spool* (``spool.py``), which keeps it durably until the
epoch that holds it is committed. What each can promise:

* ``http_push`` answers 200 when what came is durable, so a sender that gets no 200 sends again. With an
  ``Idempotency-Key`` the repetition is recognised, before and after a crash: exactly once from end to end. Without, a
  repetition counts twice, since nobody can tell it from news.
* ``iterator`` counts what it took. After a restart ``make_iterator`` is asked for the rest: exactly once, if it gives
  the same rows again.
* ``socket`` has no way to ask twice: what was under way when the driver died is lost. What reached the spool counts
  exactly once.

Without a checkpoint directory the spool is a temporary one: lost executors do no harm, the driver's end does.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import json
import socket as sockets
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import polars as pl

from penstock.connectors.base import (
    Backlog,
    BadRecord,
    Json,
    Offset,
    ReadResult,
    Source,
    SourceContext,
    SourceRange,
    Split,
)
from penstock.connectors.lines import Lines, read_jsonl
from penstock.connectors.retrying import RetryingStore
from penstock.connectors.rows import SchemaSpec, clip, parsable, polars_schema, rows_frame, salvage
from penstock.connectors.scratch import Scratch, open_scratch
from penstock.connectors.skips import leave_out_rows, read_record_skips
from penstock.connectors.spool import Bad, Batch, Spool, SpoolClosed, cut, decode_segment, folder_of
from penstock.connectors.store import FsspecStore
from penstock.errors import FlowError, SourceError
from penstock.state.store import Store

ROWS_MAX: Final = 1_000_000
BYTES_MAX: Final = 256 << 20
LINE_BYTES_MAX: Final = 1 << 20
PULLED_MAX: Final = 10_000
"""The most rows of an iterator that wait to be handed to the spool."""
RECONNECT_S_MAX: Final = 5.0
LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")
CLOSE_S: Final = 10.0

_stores: dict[str, Store] = {}
"""The stores that this worker process has opened, by address."""


class PushSource(Source):
    """What the sources of this module share: everything behind the spool. A thread of each source fills the spool."""

    linger_s = 0.0

    def __init__(self, schema: pl.Schema, rows_max: int, bytes_max: int) -> None:
        for name, value in (("rows_max", rows_max), ("bytes_max", bytes_max)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise FlowError(f"{name} must be a whole number from 1 on, not {value!r}.", remedy=f"Mend {name}.")
        self._schema = schema
        self._rows_max, self._bytes_max = rows_max, bytes_max
        self._reset()

    def _reset(self) -> None:
        self._spool: Spool | None = None
        self._url = ""
        self._temporary: Scratch | None = None
        self._closing = threading.Event()
        self.notices: list[str] = []
        self._skipped: list[str] = []

    def __getstate__(self) -> dict[str, Any]:
        """Workers need to know the columns, and nothing of threads and sockets."""
        return {"_schema": self._schema}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def schema(self) -> pl.Schema:
        return self._schema

    def initial_offset(self) -> Offset:
        return {"segment": 0, "row": 0}

    @property
    def spool(self) -> Spool:
        assert self._spool is not None, "the source is not open"
        return self._spool

    # ------------------------------------------------------------ driver side

    def open(self, context: SourceContext) -> None:
        self._reset()
        self._skipped, said = read_record_skips(context)
        self.notices += said
        url, store = context.checkpoint, context.store
        if url is None:
            self._temporary = open_scratch("spool")
            url = self._temporary.directory
            self.notices.append(
                f"source '{context.source_id}' cannot be asked again, and there is no checkpoint directory: what is "
                "not yet in the output is lost when the driver ends."
            )
        if store is None:
            store = RetryingStore(FsspecStore(url))
        self._url = url
        self._spool = Spool(
            store,
            f"spool/{folder_of(context.source_id)}",
            self._schema,
            rows_max=self._rows_max,
            bytes_max=self._bytes_max,
            linger_s=self.linger_s,
        )
        self._start(context.source_id)

    @abstractmethod
    def _start(self, source_id: str) -> None:
        """Begin to receive, in threads."""

    def _stop(self) -> None:
        """End receiving. ``_closing`` is set."""

    def plan(self, start: Offset, rows_max: int) -> SourceRange | None:
        found = self.spool.plan(start, rows_max)
        return None if found is None else SourceRange(dict(start), found[0], found[1])

    def backlog(self, offset: Offset) -> Backlog:
        rows, size = self.spool.after(offset)
        return Backlog(rows, size)

    def exhausted(self, offset: Offset) -> bool:
        return self.spool.exhausted(offset)

    def splits(self, start: Offset, end: Offset, parallelism: int) -> list[Split]:
        pieces = self.spool.pieces(start, end)
        parts = cut([(str(i), last - first) for i, (_, first, last, _) in enumerate(pieces)], parallelism)
        out: list[Split] = []
        for part in parts:
            named = []
            for each in part:
                name, first, _, _ = pieces[int(each["path"])]
                named.append({"name": name, "from": first + each["from"], "to": first + each["to"]})
            out.append({"store": self._url, "pieces": named, "bad": []})
        # All that were no rows go with the first split: which epoch has them must not depend on the parallelism.
        out[0]["bad"] = [name for name, _, _, bad in pieces if bad]
        for split in out:
            split["skip"] = self._skipped
        return out

    def committed(self, end: Offset) -> None:
        self.spool.evict(end)

    def close(self) -> None:
        self._closing.set()
        self._stop()
        if self._spool is not None:
            self._spool.close()
        if self._temporary is not None:
            self._temporary.clear()
            self._temporary = None

    # ------------------------------------------------------------ worker side

    def read(self, source_id: str, split: Mapping[str, Json]) -> ReadResult:
        frames = [pl.DataFrame(schema=self._schema)]
        bad: list[BadRecord] = []
        set_aside: list[BadRecord] = []
        skipped = {tuple(place.split(":", 1)) for place in split.get("skip", ())}
        store = _stores.setdefault(split["store"], RetryingStore(FsspecStore(split["store"])))

        def segment(name: str) -> tuple[pl.DataFrame, dict[str, Any]]:
            try:
                return decode_segment(store.get(name), name)
            except FileNotFoundError:
                raise SourceError(
                    f"{name} is not in the spool at {split['store']}.",
                    remedy="The checkpoint directory must be on a file system that executors see too.",
                    path=name,
                ) from None

        for piece in split["pieces"]:
            frame, _ = segment(piece["name"])
            frame = frame.slice(piece["from"], piece["to"] - piece["from"]).cast(self._schema)
            number, first = _number(piece["name"]), piece["from"]
            rows = [int(row) - first for n, row in skipped if n == number and row.isdecimal()]
            frame, letters = leave_out_rows(frame, rows, source_id, partial(_place, number, first))
            frames.append(frame)
            set_aside += letters
        for name in split["bad"]:
            number = _number(name)
            for i, (reason, raw) in enumerate(segment(name)[1]["bad"]):
                letter = BadRecord(source_id, f"{number}:bad{i}", reason, raw)
                (set_aside if (number, f"bad{i}") in skipped else bad).append(letter)
        return ReadResult(pl.concat(frames), tuple(bad), set_aside=tuple(set_aside))


def _number(segment: str) -> str:
    """The number of a segment, as offsets show it."""
    return str(int(segment.rpartition("/")[2].removesuffix(".arrow")))


def _place(number: str, first: int, row: int) -> str:
    return f"{number}:{first + row}"


# ---------------------------------------------------------------- text to rows


def records_schema(format: str, schema: SchemaSpec | None, caller: str) -> pl.Schema:
    if format == "text":
        if schema is not None:
            raise FlowError(
                f"{caller}: text has one column, line, and takes no schema.",
                remedy="Leave out schema=, or give format='jsonl'.",
            )
        return pl.Schema({"line": pl.String()})
    if format != "jsonl":
        raise FlowError(f"{caller}: there is no format {format!r}.", remedy="Use 'text' or 'jsonl'.")
    if schema is None:
        raise FlowError(
            f"{caller}: JSON needs a schema, because nothing can be looked at beforehand.",
            remedy='Give for example schema={"word": str, "n": int}.',
        )
    found = polars_schema(schema)
    for name, dtype in found.items():
        if isinstance(dtype, pl.Binary) or (not dtype.is_nested() and not parsable(dtype)):
            raise FlowError(f"{caller}: column {name!r}: JSON has no {dtype}.", remedy="Use a string.", column=name)
    return found


def parse_records(data: bytes, format: str, schema: pl.Schema) -> tuple[pl.DataFrame, tuple[Bad, ...]]:
    """Lines to rows and bad records. Blank lines are neither."""
    lines = Lines(data, 0)
    if format == "jsonl":
        frame, failed = read_jsonl(lines, schema)
    else:
        lines.drop_blank()
        frame, failed = pl.DataFrame({"line": lines.text}, schema=schema), lines.failed
    return frame, tuple((reason, clip(raw)) for _, reason, raw in failed)


# ---------------------------------------------------------------- a user's iterator


def iterator(
    make_iterator: Callable[..., Iterable[Any]],
    schema: SchemaSpec,
    *,
    rows_max: int = ROWS_MAX,
    bytes_max: int = BYTES_MAX,
) -> IteratorSource:
    """Rows from an iterator of yours: tuples in the order of ``schema``, mappings, or single values for one column.

    ``make_iterator`` is called on the driver, in a thread. If it takes an argument it gets the number of rows that
    were kept already: 0 at first, more after a restart. If it takes none, that number of rows is skipped; then it must
    give the same rows again. The flow ends when the iterator does. The iterator waits while the flow is ``rows_max``
    rows or ``bytes_max`` bytes behind.
    """
    if not callable(make_iterator):
        raise FlowError(
            f"iterator() needs a function that makes an iterator, not a {type(make_iterator).__name__}.",
            remedy="Write for example ps.iterator(lambda skip: rows_from(skip), schema): a restart calls it again.",
        )
    return IteratorSource(make_iterator, polars_schema(schema), rows_max, bytes_max)


class IteratorSource(PushSource):
    """See :func:`iterator`."""

    linger_s = 0.01

    def __init__(
        self, make_iterator: Callable[..., Iterable[Any]], schema: pl.Schema, rows_max: int, bytes_max: int
    ) -> None:
        super().__init__(schema, rows_max, bytes_max)
        self._make = make_iterator

    def describe(self) -> str:
        return f"iterator {getattr(getattr(self, '_make', None), '__name__', '')}".rstrip()

    def _start(self, source_id: str) -> None:
        # One thread waits for the user's code, the other for the store: rows that came singly are kept together.
        self._pulled: list[Any] = []
        self._over = False
        self._failure: Exception | None = None
        self._ready = threading.Condition()
        for work in (self._pull, self._feed):
            threading.Thread(target=work, name=f"penstock-iterator: {source_id}", daemon=True).start()

    def _iterate(self) -> Iterable[Any]:
        skip = self.spool.taken
        if _takes_an_argument(self._make):
            return self._make(skip)
        return itertools.islice(iter(self._make()), skip, None)

    def _pull(self) -> None:
        try:
            for row in self._iterate():
                with self._ready:
                    self._ready.wait_for(lambda: self._closing.is_set() or len(self._pulled) < PULLED_MAX)
                    if self._closing.is_set():
                        return
                    self._pulled.append(row)
                    self._ready.notify_all()
        except Exception as error:
            self._failure = SourceError(
                f"the iterator failed: {type(error).__name__}: {error}.",
                remedy="Correct it and start again: it goes on after the rows that were kept.",
                cause=repr(error),
            )
        finally:
            with self._ready:
                self._over = True
                self._ready.notify_all()

    def _feed(self) -> None:
        try:
            while True:
                with self._ready:
                    self._ready.wait_for(lambda: self._pulled or self._over or self._closing.is_set())
                    if self._closing.is_set():
                        return  # what was not kept is asked for again
                    rows, self._pulled = self._pulled, []
                    over = self._over
                    self._ready.notify_all()
                if rows:
                    self.spool.append(self._batch(rows), wait=True).done.wait()
                elif over:
                    self.spool.finish(self._failure)
                    return
        except SpoolClosed:
            return
        except Exception as error:
            self.spool.finish(error)

    def _batch(self, rows: Sequence[Any]) -> Batch:
        tuples = [_as_tuple(row, self._schema) for row in rows]
        frame, _, failed = salvage(tuples, lambda part: rows_frame(part, self._schema), self._schema)
        bad = tuple((why, clip(repr(rows[i]))) for i, why in failed)
        return Batch(frame, bad, taken=len(rows))

    def _stop(self) -> None:
        if self._spool is None:
            return
        with self._ready:
            self._ready.notify_all()


def _as_tuple(row: Any, schema: pl.Schema) -> Any:
    if isinstance(row, Mapping):
        return tuple(row.get(name) for name in schema)
    if len(schema) == 1 and not isinstance(row, tuple | list):
        return (row,)
    return row


def _takes_an_argument(function: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.VAR_POSITIONAL,
    )
    return any(p.kind in positional for p in parameters)


# ---------------------------------------------------------------- a socket


def socket(
    host: str,
    port: int,
    *,
    format: str = "text",
    schema: SchemaSpec | None = None,
    reconnect: bool = True,
    patience_s: float = 60.0,
    rows_max: int = ROWS_MAX,
    bytes_max: int = BYTES_MAX,
) -> SocketSource:
    """Lines from a TCP server: ``text`` (one column, ``line``) or ``jsonl`` with a ``schema``.

    A peer that cannot be reached, or has hung up, is tried again for ``patience_s`` seconds, with growing pauses; then
    the job fails. ``reconnect=False``: when the peer hangs up, the input is over. A line cut off by that becomes a
    dead letter, as does one of more than a mebibyte. While the flow is behind by ``rows_max`` or ``bytes_max`` nothing
    is read, and TCP slows the peer down.
    """
    if not isinstance(host, str) or not host:
        raise FlowError(f"socket() needs a host, not {host!r}.", remedy='Write for example ps.socket("localhost", 9).')
    _check_port(port, "socket", low=1)
    return SocketSource(
        host, port, format, records_schema(format, schema, "socket()"), reconnect, patience_s, rows_max, bytes_max
    )


def _check_port(port: Any, caller: str, low: int) -> None:
    if isinstance(port, bool) or not isinstance(port, int) or not low <= port <= 65_535:
        raise FlowError(f"{caller}() cannot use port {port!r}.", remedy=f"Give a whole number from {low} to 65535.")


class SocketSource(PushSource):
    """See :func:`socket`."""

    linger_s = 0.02

    def __init__(
        self,
        host: str,
        port: int,
        format: str,
        schema: pl.Schema,
        reconnect: bool,
        patience_s: float,
        rows_max: int,
        bytes_max: int,
    ) -> None:
        super().__init__(schema, rows_max, bytes_max)
        self._host, self._port, self._format = host, port, format
        self._reconnect, self._patience_s = reconnect, patience_s
        self._connection: sockets.socket | None = None

    def describe(self) -> str:
        return f"socket {getattr(self, '_host', '')}:{getattr(self, '_port', '')}"

    def _start(self, source_id: str) -> None:
        self._connection = None
        threading.Thread(target=self._receive, name=f"penstock-socket: {source_id}", daemon=True).start()

    def _receive(self) -> None:
        try:
            while not self._closing.is_set():
                connection = self._connect()
                if connection is None:
                    return
                with connection:
                    self._read_lines(connection)
                self._connection = None
                if not self._reconnect:
                    self.spool.finish()
                    return
        except SpoolClosed:
            return
        except Exception as error:
            self.spool.finish(error)

    def _connect(self) -> sockets.socket | None:
        began, pause = time.monotonic(), 0.1
        while not self._closing.is_set():
            try:
                connection = sockets.create_connection((self._host, self._port), timeout=10.0)
            except OSError as error:
                if time.monotonic() - began >= self._patience_s:
                    raise SourceError(
                        f"{self._host}:{self._port} could not be reached for {self._patience_s:g} s: {error}.",
                        remedy="Start the peer, or correct the address; then start again with the same checkpoint.",
                        host=self._host,
                        port=self._port,
                    ) from error
                self._closing.wait(pause)
                pause = min(RECONNECT_S_MAX, pause * 2)
                continue
            connection.settimeout(None)
            self._connection = connection
            if self._closing.is_set():
                connection.close()
                return None
            return connection
        return None

    def _read_lines(self, connection: sockets.socket) -> None:
        """Until the peer hangs up. Chunks are cut at the last line end; a line that never ends is not kept whole."""
        rest, too_long = b"", False
        while True:
            try:
                chunk = connection.recv(1 << 16)
            except OSError:
                chunk = b""
            if self._closing.is_set():
                return
            if not chunk:
                break
            if too_long:
                end = chunk.find(b"\n")
                if end < 0:
                    continue
                chunk, too_long = chunk[end + 1 :], False
            data = rest + chunk
            end = data.rfind(b"\n") + 1
            rest = data[end:]
            if end:
                frame, bad = parse_records(data[:end], self._format, self._schema)
                self._keep(frame, bad)
            if len(rest) > LINE_BYTES_MAX:
                self._keep(None, ((f"a line of more than {LINE_BYTES_MAX} bytes", clip(rest)),))
                rest, too_long = b"", True
        if rest:
            self._keep(None, (("the connection was lost in the middle of a line", clip(rest)),))

    def _keep(self, frame: pl.DataFrame | None, bad: tuple[Bad, ...]) -> None:
        if frame is None:
            frame = pl.DataFrame(schema=self._schema)
        if frame.height or bad:
            self.spool.append(Batch(frame, bad), wait=True)

    def _stop(self) -> None:
        connection = self._connection
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(sockets.SHUT_RDWR)


# ---------------------------------------------------------------- records that others send


def http_push(
    port: int,
    schema: SchemaSpec | None = None,
    *,
    path: str = "/",
    host: str = "127.0.0.1",
    token: str | None = None,
    format: str = "jsonl",
    body_bytes_max: int = 8 << 20,
    rows_max: int = ROWS_MAX,
    bytes_max: int = BYTES_MAX,
) -> Any:
    """Records that others POST: JSON lines, a JSON array or object (``application/json``), or ``text`` lines.

    The answer is 200 only when what came is durably kept: a sender without one sends again, best with the same
    ``Idempotency-Key``, by which a repetition is recognised (the last 10,000 keys, over restarts too). 429: the flow
    is ``rows_max`` rows or ``bytes_max`` bytes behind; 413: more than ``body_bytes_max``; 503: the store is away or
    the job ends. With a ``token``, senders need ``Authorization: Bearer <token>``; an address that is not this
    machine's own cannot be used without one. ``port=0`` takes a free one: see ``address`` of what this returns.
    """
    from penstock.connectors.push_http import HttpSource

    _check_port(port, "http_push", low=0)
    if not isinstance(path, str) or not path.startswith("/") or "?" in path:
        raise FlowError(f"http_push() cannot use path {path!r}.", remedy='Write for example path="/events".')
    if token is not None and (not isinstance(token, str) or not token):
        raise FlowError("http_push(): a token must be a text that is not empty.", remedy="Give one, or leave it out.")
    if host not in LOOPBACK and token is None:
        raise FlowError(
            f"http_push() on {host} would take records from anyone.",
            remedy="Give token=, or leave host= at this machine's own address.",
        )
    if isinstance(body_bytes_max, bool) or not isinstance(body_bytes_max, int) or body_bytes_max < 1:
        raise FlowError("body_bytes_max must be a whole number from 1 on.", remedy="Mend body_bytes_max.")
    found = records_schema(format, schema, "http_push()")
    return HttpSource(host, port, path, token, format, found, body_bytes_max, rows_max, bytes_max)


def json_lines(body: bytes) -> bytes:
    """A whole JSON document to lines: the elements of an array, or the one object. Raises ValueError."""
    try:
        document = json.loads(body)
        items = document if isinstance(document, list) else [document]
        return b"".join(json.dumps(item, ensure_ascii=False).encode() + b"\n" for item in items)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


__all__ = ["IteratorSource", "PushSource", "SocketSource", "http_push", "iterator", "socket"]
