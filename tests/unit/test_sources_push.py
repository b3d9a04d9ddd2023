"""Sources that say everything once: kept before it is shown, shown exactly once, deleted when committed."""

from __future__ import annotations

import contextlib
import http.client
import json
import pickle
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import polars as pl
import pytest

import penstock as ps
from penstock.connectors.base import Offset, ReadResult, Source, SourceContext
from penstock.connectors.push import PushSource
from penstock.connectors.push_http import HttpSource
from penstock.connectors.spool import Batch, Spool, SpoolClosed, SpoolFull, cut
from penstock.control.events import (
    WriteManifest,
)
from penstock.engines.job import Job, start
from penstock.engines.runtime import Runtime
from penstock.errors import CheckpointInUse, CorruptData, FlowError, SourceError
from penstock.state.store import FailingStore, MemoryStore

SCHEMA = pl.Schema({"k": pl.String(), "n": pl.Int64()})
START: Offset = {"segment": 0, "row": 0}


def batch(*rows: tuple[str, int], **more: Any) -> Batch:
    return Batch(pl.DataFrame(rows, SCHEMA, orient="row"), **more)


def spool(store: Any, **settings: Any) -> Spool:
    return Spool(store, "spool/in", SCHEMA, **{"rows_max": 100, "bytes_max": 1 << 20, **settings})


def kept(one: Spool, *batches: Batch) -> None:
    for each in batches:
        done = one.append(each, wait=True)
        assert done.done.wait(120) and done.error is None


def opened(source: PushSource, place: Path | None) -> Any:
    source.open(SourceContext("in", str(place) if place is not None else None))
    source.remember([])
    return source


def all_of(source: PushSource, at: Offset = START, *, parallelism: int = 2, rows_max: int = 1000) -> list[ReadResult]:
    """What is there now, range by range; reading is done by a copy, as on a worker."""
    worker: Source = pickle.loads(pickle.dumps(source))
    out = []
    while (found := source.plan(at, rows_max)) is not None:
        parts = [
            worker.read("in", json.loads(json.dumps(s))) for s in source.splits(found.start, found.end, parallelism)
        ]
        out.append(ReadResult(pl.concat([p.frame for p in parts]), tuple(b for p in parts for b in p.bad)))
        at = found.end
    return out


def until(source: PushSource, rows: int) -> None:
    """Wait, by the spool's own condition, until so many records are durable."""
    with source.spool.wake:
        there = source.spool.wake.wait_for(
            lambda: source.spool.error or sum(s.rows + s.bad for s in source.spool.segments.values()) >= rows, 20
        )
    assert there, "it never came"


# ---- the spool ----


def test_nothing_is_shown_before_it_is_durable() -> None:
    allow = threading.Event()

    class Slow(MemoryStore):
        def put_if_absent(self, name: str, data: bytes) -> bool:
            assert allow.wait(120)
            return super().put_if_absent(name, data)

    one = spool(Slow())
    first = one.append(batch(("a", 1)), wait=True)
    assert one.plan(START, 10) is None and not first.done.is_set()
    allow.set()
    assert first.done.wait(120)
    assert one.plan(START, 10) == ({"segment": 1, "row": 0}, 1)
    one.close()


def test_batches_that_come_while_it_writes_share_a_segment() -> None:
    entered, allow = threading.Event(), threading.Event()

    class Slow(MemoryStore):
        def put_if_absent(self, name: str, data: bytes) -> bool:
            entered.set()
            assert allow.wait(120)
            return super().put_if_absent(name, data)

    one = spool(Slow())
    batches = [one.append(batch(("first", 0)), wait=True)]
    assert entered.wait(120)
    batches += [one.append(batch(("b", i)), wait=True) for i in range(9)]
    allow.set()
    assert all(b.done.wait(120) for b in batches)
    assert [s.rows for s in one.segments.values()] == [1, 9]
    one.close()


@pytest.mark.parametrize("rows_max", [1, 2, 3, 7, 100])
def test_ranges_cover_every_row_once_whatever_their_size(rows_max: int) -> None:
    one = spool(MemoryStore())
    kept(one, *(batch(*((f"s{s}", i) for i in range(s))) for s in (3, 1, 5)))
    kept(one, Batch(pl.DataFrame(schema=SCHEMA), (("why", "raw"),)), batch(("last", 1)))
    at, seen, bad = START, [], 0
    while (found := one.plan(at, rows_max)) is not None:
        assert found[1] >= 1
        for name, first, last, due in one.pieces(at, found[0]):
            seen += [(name, row) for row in range(first, last)]
            bad += due
        at = found[0]
    assert len(seen) == len(set(seen)) == 10 and seen == sorted(seen) and bad == 1
    one.close()


def test_after_a_restart_everything_is_there_and_after_eviction_it_is_gone() -> None:
    disk = MemoryStore()
    one = spool(disk)
    kept(one, batch(("a", 1), key="k1", taken=1), batch(("b", 2), key="k2", taken=1), batch(("c", 3), taken=1))
    one.evict({"segment": 2, "row": 0})
    assert disk.list() == ["spool/in/000000000002.arrow", "spool/in/seen.json"]
    one.close()
    again = spool(disk)
    assert (again.next, again.taken) == (3, 3)
    repeated = again.append(batch(("a", 1), key="k1"), wait=False)
    assert repeated.repeated and repeated.done.is_set(), "known although its segment is gone"
    assert again.plan({"segment": 2, "row": 0}, 10) == ({"segment": 3, "row": 0}, 1)
    again.evict({"segment": 3, "row": 0})
    again.close()
    last = spool(disk)
    kept(last, batch(("d", 4)))
    assert list(last.segments) == [3], "numbers are never used twice"
    last.close()


def test_only_the_last_keys_are_remembered() -> None:
    disk = MemoryStore()
    one = spool(disk, keys_kept=3)
    kept(one, *(batch(("a", i), key=f"k{i}") for i in range(5)))
    assert list(one.keys) == ["k2", "k3", "k4"]
    one.evict({"segment": 5, "row": 0})
    one.close()
    assert json.loads(disk.get("spool/in/seen.json"))["keys"] == ["k2", "k3", "k4"]


def test_the_same_key_twice_at_once_is_one_batch() -> None:
    allow = threading.Event()

    class Slow(MemoryStore):
        def put_if_absent(self, name: str, data: bytes) -> bool:
            assert allow.wait(120)
            return super().put_if_absent(name, data)

    one = spool(Slow())
    first = one.append(batch(("a", 1), key="k"), wait=False)
    assert one.append(batch(("a", 1), key="k"), wait=False) is first
    allow.set()
    assert first.done.wait(120) and sum(s.rows for s in one.segments.values()) == 1
    one.close()


def test_the_backlog_is_bounded_by_rows_and_bytes_and_frees_itself() -> None:
    one = spool(MemoryStore(), rows_max=4)
    kept(one, batch(("a", 1), ("b", 2), ("c", 3)))
    with pytest.raises(SpoolFull):
        one.append(batch(("d", 4), ("e", 5)), wait=False)
    waited = threading.Thread(target=lambda: kept(one, batch(("d", 4), ("e", 5))))
    waited.start()
    assert one.plan(START, 100) is not None  # an epoch took it up
    waited.join(120)
    assert not waited.is_alive() and len(one.segments) == 2
    one.close()
    small = spool(MemoryStore(), bytes_max=100)
    kept(small, batch(*(("x" * 50, i) for i in range(10))))  # alone it may be larger than the limit
    with pytest.raises(SpoolFull):
        small.append(batch(("y", 1)), wait=False)
    small.close()


def test_a_store_that_fails_is_an_error_for_the_sender_and_for_the_job() -> None:
    one = spool(FailingStore(MemoryStore(), fail_at=2))
    kept(one, batch(("a", 1)))
    lost = one.append(batch(("b", 2)), wait=True)
    assert lost.done.wait(120) and isinstance(lost.error, SourceError)
    assert one.plan(START, 10) == ({"segment": 1, "row": 0}, 1), "what was kept before is still read"
    with pytest.raises(SourceError, match="could not be kept"):
        one.plan({"segment": 1, "row": 0}, 10)
    with pytest.raises(SourceError, match="could not be kept"):
        one.append(batch(("c", 3)), wait=True)
    one.close()


def test_a_segment_is_never_replaced() -> None:
    disk = MemoryStore()
    one = spool(disk)
    disk.put("spool/in/000000000000.arrow", b"of another start")
    lost = one.append(batch(("a", 1)), wait=True)
    assert lost.done.wait(120) and isinstance(lost.error, CheckpointInUse)
    assert disk.get("spool/in/000000000000.arrow") == b"of another start"
    one.close()
    with pytest.raises(CorruptData, match="damaged"):
        spool(disk)


def test_closing_refuses_and_wakes_who_waits() -> None:
    one = spool(MemoryStore(), rows_max=1)
    kept(one, batch(("a", 1)))
    refused = threading.Event()

    def wait_for_room() -> None:
        with pytest.raises(SpoolClosed):
            one.append(batch(("b", 2)), wait=True)
        refused.set()

    waiting = threading.Thread(target=wait_for_room)
    waiting.start()
    one.close()
    assert refused.wait(120)
    waiting.join(120)


def test_cutting_is_even_and_complete() -> None:
    assert cut([], 3) == [[]]
    parts = cut([("a", 5), ("b", 0), ("c", 4)], 3)
    assert [sum(p["to"] - p["from"] for p in part) for part in parts] == [3, 3, 3]
    assert [p["path"] for part in parts for p in part] == ["a", "a", "c", "c"]


# ---- iterators ----


def test_an_iterator_of_tuples_mappings_and_nonsense(tmp_path: Path) -> None:
    given = [("a", 1), {"k": "b", "n": 2}, {"k": "c"}, ("d", "four"), ("e",), ("f", 6)]
    source = opened(ps.iterator(lambda skip: given[skip:], SCHEMA), tmp_path)
    until(source, 6)
    results = all_of(source)
    assert pl.concat([r.frame for r in results]).rows() == [("a", 1), ("b", 2), ("c", None), ("f", 6)]
    bad = [b for r in results for b in r.bad]
    assert [b.raw for b in bad] == ["('d', 'four')", "('e',)"] and all(b.source == "in" for b in bad)
    end = {"segment": source.spool.next, "row": 0}
    with source.spool.wake:
        assert source.spool.wake.wait_for(lambda: source.spool.finished, 10)
    assert source.exhausted(end)
    source.close()


def test_a_restart_asks_the_iterator_for_the_rest(tmp_path: Path) -> None:
    asked: list[int] = []
    more = threading.Event()

    def rows(skip: int) -> Iterator[tuple[str, int]]:
        asked.append(skip)
        for i in range(skip, 10):
            if i == 6 and not more.is_set():
                more.wait(120)
                return
            yield "k", i

    source = opened(ps.iterator(rows, SCHEMA), tmp_path)
    until(source, 6)
    source.close()
    more.set()
    again = opened(ps.iterator(rows, SCHEMA), tmp_path)
    until(again, 10)
    assert asked == [0, 6]
    assert [n for r in all_of(again) for n in r.frame["n"]] == list(range(10))
    again.close()


def test_an_iterator_without_an_argument_is_skipped_over(tmp_path: Path) -> None:
    source = opened(ps.iterator(lambda: iter(range(5)), {"n": int}), tmp_path)
    until(source, 5)
    source.close()
    again = opened(ps.iterator(lambda: iter(range(8)), {"n": int}), tmp_path)
    until(again, 8)
    assert [n for r in all_of(again) for n in r.frame["n"]] == list(range(8))
    again.close()


def test_an_iterator_that_raises_ends_the_job_and_what_it_gave_is_kept(tmp_path: Path) -> None:
    wet = False

    def rows() -> Iterator[int]:
        yield 1
        if not wet:
            raise RuntimeError("the well is dry")
        yield 2

    def job(out: Any) -> Job:
        flow = ps.Flow("dry")
        flow.source("in", ps.iterator(rows, {"n": int})).sink("out", out)
        return start(flow, engine="local", config=ps.Config(checkpoint=str(tmp_path / "checkpoint")))

    out = tmp_path / "out"
    with pytest.raises(SourceError, match="the well is dry"):
        job(ps.parquet(out)).wait(120)
    wet = True
    job(ps.parquet(out)).wait(120)
    assert ps.read_output(out)["n"].to_list() == [1, 2]


def test_without_a_checkpoint_directory_the_job_says_what_that_means() -> None:
    flow = ps.Flow("brief")
    flow.source("in", ps.iterator(lambda: [1], {"n": int})).sink("out", ps.memory())
    job = start(flow, engine="local", config=ps.Config())
    job.wait(120)
    assert any("no checkpoint directory" in n for n in job.notices)


def test_a_flow_over_an_iterator_ends_with_it_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The thread that collects garbage is still busy with the last manifest when the job ends.
    ending, shutdown, write = threading.Event(), ThreadPoolExecutor.shutdown, Runtime._write_manifest

    def ends(pool: ThreadPoolExecutor, wait: bool = True, *, cancel_futures: bool = False) -> None:
        shutdown(pool, wait=False, cancel_futures=cancel_futures)
        if pool._thread_name_prefix == "penstock-publish":
            ending.set()
        shutdown(pool, wait=wait)

    def writing(runtime: Runtime, command: WriteManifest) -> None:
        write(runtime, command)
        assert not command.manifest.clocks["final"] or ending.wait(120)

    monkeypatch.setattr(ThreadPoolExecutor, "shutdown", ends)
    monkeypatch.setattr(Runtime, "_write_manifest", writing)
    got = ps.memory()
    flow = ps.Flow("counted")
    stream = flow.source("in", ps.iterator(lambda skip: ((f"k{i % 3}", i) for i in range(skip, 3000)), SCHEMA))
    stream.key_by("k").aggregate("sums", n=ps.count(), s=ps.sum("n")).sink("out", got)
    config = ps.Config(checkpoint=str(tmp_path), epoch_rows=100, checkpoint_interval_s=0, manifests_kept=1)
    start(flow, engine="local", config=config).wait(120)
    last = got.frame().group_by("k").agg(pl.col("n").max(), pl.col("s").max()).sort("k")
    assert last.rows() == [(f"k{r}", 1000, sum(range(r, 3000, 3))) for r in range(3)]
    assert [f.name for f in (tmp_path / "spool" / "in").iterdir()] == ["seen.json"], "committed, so deleted"


# ---- sockets ----


class Peer:
    """A server that says what it is told to, to one connection after the other."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.listener.getsockname()[1]

    def say(self, data: bytes) -> None:
        connection, _ = self.listener.accept()
        with connection:
            connection.sendall(data)

    def close(self) -> None:
        self.listener.close()


@pytest.fixture
def peer() -> Iterator[Peer]:
    one = Peer()
    one.listener.settimeout(20)
    yield one
    one.close()


def test_lines_of_a_socket_until_the_peer_hangs_up(peer: Peer, tmp_path: Path) -> None:
    source = opened(ps.socket("127.0.0.1", peer.port, reconnect=False), tmp_path)
    peer.say(b"one\r\n\ntwo\n\xff\xfe\nthree\ncut o")
    with source.spool.wake:
        assert source.spool.wake.wait_for(lambda: source.spool.finished, 20)
    results = all_of(source)
    assert [line for r in results for line in r.frame["line"]] == ["one", "two", "three"]
    reasons = [b.reason for r in results for b in r.bad]
    assert len(reasons) == 2 and "not UTF-8" in reasons[0] and "middle of a line" in reasons[1]
    source.close()


def test_a_socket_connects_again(peer: Peer, tmp_path: Path) -> None:
    source = opened(ps.socket("127.0.0.1", peer.port, format="jsonl", schema=SCHEMA), tmp_path)
    peer.say(b'{"k": "a", "n": 1}\n')
    peer.say(b'{"k": "b", "n": 2}\nnot json\n')
    until(source, 3)
    results = all_of(source)
    assert [row for r in results for row in r.frame.rows()] == [("a", 1), ("b", 2)]
    assert [b.raw for r in results for b in r.bad] == ["not json"]
    source.close()


def test_an_endless_line_is_not_kept_whole(peer: Peer, tmp_path: Path) -> None:
    source = opened(ps.socket("127.0.0.1", peer.port, reconnect=False), tmp_path)
    peer.say(b"x" * (3 << 20) + b"\nafter\n")
    with source.spool.wake:
        assert source.spool.wake.wait_for(lambda: source.spool.finished, 20)
    results = all_of(source)
    assert [line for r in results for line in r.frame["line"]] == ["after"]
    (bad,) = [b for r in results for b in r.bad]
    assert "a line of more than" in bad.reason and len(bad.raw) == 500
    source.close()


def test_a_peer_that_cannot_be_reached_is_named(peer: Peer) -> None:
    peer.close()
    flow = ps.Flow("lonely")
    flow.source("in", ps.socket("127.0.0.1", peer.port, patience_s=0)).sink("out", ps.memory())
    with pytest.raises(SourceError, match=f"127.0.0.1:{peer.port} could not be reached"):
        start(flow, engine="local", config=ps.Config()).wait(120)


# ---- HTTP ----


def post(source: HttpSource, body: bytes | str, path: str | None = None, **headers: str) -> tuple[int, dict[str, Any]]:
    assert source.address is not None
    url = urlsplit(source.address)
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=120)
    try:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request("POST", path or url.path, body, named)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Callable[..., HttpSource]]:
    sources: list[HttpSource] = []

    def serve(**settings: Any) -> HttpSource:
        source: HttpSource = opened(ps.http_push(0, SCHEMA, **settings), tmp_path)
        sources.append(source)
        return source

    yield serve
    for source in sources:
        source.close()


def test_posts_become_rows_and_are_durable_when_answered(served: Callable[..., HttpSource], tmp_path: Path) -> None:
    source = served(path="/events")
    assert post(source, '{"k": "a", "n": 1}\n{"k": "b", "n": 2}\n') == (200, {"rows": 2, "bad": 0})
    assert len(list((tmp_path / "spool" / "in").glob("*.arrow"))) == 1
    array = '[{"k": "ü", "n": 3},\n {"n": 4}]'
    assert post(source, array.encode(), Content_Type="application/json; charset=utf-8")[0] == 200
    assert post(source, '{"k": "e", "n": "five"}\n[1]\n{"k": "f", "n": 6}') == (200, {"rows": 1, "bad": 2})
    assert post(source, "") == (200, {"rows": 0, "bad": 0})
    results = all_of(source)
    expected = [("a", 1), ("b", 2), ("ü", 3), (None, 4), ("f", 6)]
    assert [row for r in results for row in r.frame.rows()] == expected
    assert len([b for r in results for b in r.bad]) == 2


def test_what_is_refused(served: Callable[..., HttpSource]) -> None:
    source = served(path="/in", token="secret", body_bytes_max=100)
    right = {"Authorization": "Bearer secret"}
    assert post(source, "{}", **right)[0] == 200
    assert post(source, "{}")[0] == 401
    assert post(source, "{}", Authorization="Bearer wrong")[0] == 401
    assert post(source, "{}", path="/elsewhere", **right)[0] == 404
    assert post(source, "x" * 101, **right)[0] == 413
    assert post(source, "[", Content_Type="application/json", **right)[0] == 400
    assert post(source, "{}", Idempotency_Key="x" * 300, **right)[0] == 400
    assert post(source, "{}\r\n", Transfer_Encoding="chunked", **right)[0] == 400
    assert sum(r.frame.height for r in all_of(source)) == 1


def test_half_a_request_is_none(served: Callable[..., HttpSource]) -> None:
    source = served()
    assert source.address is not None
    url = urlsplit(source.address)
    with socket.create_connection((url.hostname, url.port)) as connection:
        connection.sendall(b"POST / HTTP/1.1\r\nContent-Length: 100\r\n\r\n" + b'{"k": "a", "n": 1}\n')
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(100) == b"", "hung up without an answer"
    assert post(source, '{"k": "b", "n": 2}')[0] == 200
    assert [row for r in all_of(source) for row in r.frame.rows()] == [("b", 2)]


def talk(source: HttpSource, data: bytes, *, until: bytes = b"") -> bytes:
    """Send these bytes, and give what comes back until the server hangs up, or until it has said ``until``."""
    with connect(source) as connection:
        connection.sendall(data)
        return heard(connection, until)


def connect(source: HttpSource) -> socket.socket:
    url = urlsplit(source.address or "")
    return socket.create_connection((url.hostname, url.port), timeout=20)


def heard(connection: socket.socket, until: bytes = b"") -> bytes:
    got = b""
    while not until or until not in got:
        try:
            data = connection.recv(1 << 16)
        except ConnectionResetError:
            break
        if not data:
            break
        got += data
    return got


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer else 0


ROW = b'{"k": "a", "n": 1}\n'


def test_chunks_and_several_requests_on_one_connection(served: Callable[..., HttpSource]) -> None:
    source = served()
    chunks = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5;x=y\r\n" + ROW[:5] + b"\r\ne\r\n" + ROW[5:]
    chunks += b"\r\n0\r\nTrailer: t\r\n\r\n"
    plain = b"POST / HTTP/1.1\r\nContent-Length: 19\r\nExpect: 100-continue\r\n\r\n" + ROW
    last = b"POST / HTTP/1.1\r\nContent-Length: 19\r\nConnection: close\r\n\r\n" + ROW
    answer = talk(source, chunks + plain + last)
    assert answer.count(b"HTTP/1.1 200 OK") == 3 and answer.count(b"HTTP/1.1 100 Continue") == 1
    assert sum(r.frame.height for r in all_of(source)) == 3


@pytest.mark.parametrize("of_a_peer", [8, 100])
def test_drippers_do_not_keep_an_honest_sender_out(served: Callable[..., HttpSource], of_a_peer: int) -> None:
    """More connections than the limit, each with a piece of a head that never ends. All deadlines are far away."""
    source = served()
    source.head_s = source.body_s = source.idle_s = 3600.0
    source.connections_max, source.peer_connections_max = 8, of_a_peer
    drippers = [connect(source) for _ in range(20)]
    try:
        for each in drippers:
            with contextlib.suppress(OSError):  # it may have been closed already
                each.sendall(b"POST / HT")
        for i in range(12):
            assert post(source, json.dumps({"k": "a", "n": i})) == (200, {"rows": 1, "bad": 0})
        # The oldest have gone: each hears that its connection is closed.
        assert heard(drippers[0]) == b""
    finally:
        for each in drippers:
            each.close()


def test_those_that_send_half_a_body_make_room_too(served: Callable[..., HttpSource]) -> None:
    source = served()
    source.head_s = source.body_s = 3600.0
    source.connections_max = source.peer_connections_max = 4
    slow = [connect(source) for _ in range(4)]
    try:
        for each in slow:
            each.sendall(b"POST / HTTP/1.1\r\nContent-Length: 100\r\nExpect: 100-continue\r\n\r\n")
            assert b"100 Continue" in heard(each, b"\r\n\r\n"), "its head is there"
        assert post(source, ROW) == (200, {"rows": 1, "bad": 0})
        assert heard(slow[0]) == b""
    finally:
        for each in slow:
            each.close()


def test_a_peer_beyond_its_limit_loses_its_own_connections(served: Callable[..., HttpSource]) -> None:
    source = served()
    source.idle_s = source.head_s = 3600.0
    source.peer_connections_max = 2
    other = connect_from(source, "127.0.0.2")
    many = [connect_from(source, "127.0.0.1") for _ in range(3)]
    try:
        assert heard(many[0]) == b"", "the oldest of the peer that has too many"
        request = b"POST / HTTP/1.1\r\nContent-Length: 19\r\n\r\n" + ROW
        for each in (other, many[1], many[2]):
            each.sendall(request)
            assert status_of(heard(each, b"}")) == 200
    finally:
        for each in (other, *many):
            each.close()


def connect_from(source: HttpSource, address: str) -> socket.socket:
    url = urlsplit(source.address or "")
    return socket.create_connection((url.hostname, url.port), timeout=20, source_address=(address, 0))


@pytest.mark.parametrize(
    ("sent", "names"),
    [
        (b"", "head_s"),
        (b"POST / HTTP/1.1\r\nContent-Le", "head_s"),
        (b"POST / HTTP/1.1\r\nContent-Length: 5\r\n\r\n12", "body_s"),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n12", "body_s"),
    ],
)
def test_what_never_ends_is_answered_when_its_time_is_over(
    served: Callable[..., HttpSource], sent: bytes, names: str
) -> None:
    source = served(body_bytes_max=100)
    setattr(source, names, 0.01)
    assert status_of(talk(source, sent)) == 408


def test_an_idle_connection_is_closed(served: Callable[..., HttpSource]) -> None:
    source = served()
    source.idle_s = 0.01
    answer = talk(source, b"POST / HTTP/1.1\r\nContent-Length: 19\r\n\r\n" + ROW)
    assert answer.startswith(b"HTTP/1.1 200") and b"408" in answer


def test_bodies_under_way_share_a_limit(served: Callable[..., HttpSource]) -> None:
    source = served(body_bytes_max=1000)
    source.bodies_bytes_max = 1000
    source.body_s = source.head_s = 3600.0
    with connect(source) as first:
        first.sendall(b"POST / HTTP/1.1\r\nContent-Length: 900\r\nExpect: 100-continue\r\n\r\n" + b" " * 800)
        assert b"100 Continue" in heard(first, b"\r\n\r\n")
        assert post(source, b" " * 900 + ROW) == (200, {"rows": 1, "bad": 0}), "the one that came first makes room"
        assert heard(first) == b""


def test_deep_json_is_answered(served: Callable[..., HttpSource]) -> None:
    source = served()
    deep = "[" * 200_000 + "]" * 200_000
    assert post(source, deep, Content_Type="application/json")[0] == 400
    assert post(source, '{"k": ' + deep + "}") == (200, {"rows": 0, "bad": 1})
    assert post(source, ROW)[0] == 200


def test_a_mistake_of_ours_is_an_answer_too(served: Callable[..., HttpSource], monkeypatch: pytest.MonkeyPatch) -> None:
    source = served()
    monkeypatch.setattr(source, "take", lambda *_: 1 / 0)
    assert post(source, ROW)[0] == 500


def test_a_key_makes_a_repetition_harmless_over_restarts_too(tmp_path: Path) -> None:
    first: HttpSource = opened(ps.http_push(0, SCHEMA), tmp_path)
    assert post(first, '{"k": "a", "n": 1}', Idempotency_Key="one") == (200, {"rows": 1, "bad": 0})
    assert post(first, '{"k": "a", "n": 1}', Idempotency_Key="one") == (200, {"rows": 1, "bad": 0, "repeated": True})
    first.close()
    second: HttpSource = opened(ps.http_push(0, SCHEMA), tmp_path)
    assert post(second, '{"k": "a", "n": 1}', Idempotency_Key="one")[1]["repeated"] is True
    assert post(second, '{"k": "a", "n": 1}')[0] == 200, "without a key it is news"
    assert sum(r.frame.height for r in all_of(second)) == 2
    second.close()


def test_a_flow_that_is_behind_says_429_and_takes_more_later(served: Callable[..., HttpSource]) -> None:
    source = served(rows_max=2)
    assert post(source, '{"n": 1}\n{"n": 2}')[0] == 200
    status, said = post(source, '{"n": 3}')
    assert status == 429 and "behind" in said["error"]
    assert source.plan(START, 100) is not None
    assert post(source, '{"n": 3}')[0] == 200


def test_a_port_in_use_is_named(served: Callable[..., HttpSource], tmp_path: Path) -> None:
    taken = urlsplit(served().address or "").port
    flow = ps.Flow("second")
    flow.source("in", ps.http_push(taken or 0, SCHEMA)).sink("out", ps.memory())
    with pytest.raises(SourceError, match=f"cannot listen on 127.0.0.1:{taken}") as caught:
        start(flow, engine="local", config=ps.Config()).wait(120)
    assert "choose another port" in caught.value.remedy


def test_many_senders_at_once_each_once(tmp_path: Path) -> None:
    source = ps.http_push(0, SCHEMA)
    got = ps.memory()
    flow = ps.Flow("pushed")
    flow.source("in", source).sink("out", got)
    job = start(flow, engine="local", config=ps.Config(checkpoint=str(tmp_path / "c"), checkpoint_interval_s=0))
    assert source.opened.wait(120)
    failed: list[Any] = []

    def send(sender: int) -> None:
        for i in range(20):
            said = post(source, json.dumps({"k": f"s{sender}", "n": i}), Idempotency_Key=f"{sender}-{i}")
            if said[0] != 200:
                failed.append(said)

    threads = [threading.Thread(target=send, args=(s,)) for s in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert failed == []
    with source.spool.wake:  # a stop leaves in the spool what no epoch has taken up, for the next start
        assert source.spool.wake.wait_for(lambda: source.spool.backlog()[0] == 0, 20)
    job.stop()
    frame = got.frame()
    assert frame.height == 160 and frame.unique().height == 160
    by_sender = frame.group_by("k", maintain_order=True).agg("n")
    assert all(n == list(range(20)) for n in by_sender["n"].to_list()), "each sender's in its order"


# ---- what is refused when the flow is built ----


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: ps.iterator([1, 2], {"n": int}), "needs a function"),  # type: ignore[arg-type]
        (lambda: ps.iterator(list, {}), "at least one column"),
        (lambda: ps.iterator(list, {"n": int}, rows_max=0), "rows_max"),
        (lambda: ps.socket("", 1), "needs a host"),
        (lambda: ps.socket("x", 0), "port 0"),
        (lambda: ps.socket("x", 1, format="xml"), "no format 'xml'"),
        (lambda: ps.socket("x", 1, schema={"a": str}), "takes no schema"),
        (lambda: ps.socket("x", 1, format="jsonl"), "needs a schema"),
        (lambda: ps.http_push(70000, {"a": str}), "port 70000"),
        (lambda: ps.http_push(0, {"a": str}, path="events"), "path 'events'"),
        (lambda: ps.http_push(0, {"a": str}, host="0.0.0.0"), "from anyone"),
        (lambda: ps.http_push(0, {"a": str}, token=""), "a token"),
        (lambda: ps.http_push(0, {"a": bytes}), "JSON has no"),
    ],
)
def test_mistakes_are_named_when_the_flow_is_built(make: Callable[[], Any], says: str) -> None:
    with pytest.raises(FlowError, match=says) as caught:
        make()
    assert caught.value.remedy
