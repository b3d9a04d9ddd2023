"""No input wedges a job: what cannot be read is corrected, set aside by a logged verdict, or left out by order.

Jobs are ended at the steps of a commit, as a killed driver would end them, and started again.
"""

from __future__ import annotations

import gzip
import json
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from typer.testing import CliRunner

import penstock as ps
from penstock.cli import app
from penstock.connectors.base import SourceContext
from penstock.connectors.skips import REASON, Skip, read_skips, write_skip
from penstock.connectors.store import DirectoryLock
from penstock.engines.job import Job, start
from penstock.engines.skipping import list_skips, order_skip
from penstock.errors import (
    BadRecordError,
    CheckpointInUse,
    ConfigError,
    CorruptData,
    EngineError,
    PenstockError,
    SourceError,
)
from penstock.state.store import MemoryStore

SCHEMA = {"n": int, "word": str}


class Bench:
    """A directory of files, a checkpoint directory, outputs, and a flow that counts and copies."""

    def __init__(self, root: Path) -> None:
        self.files, self.checkpoint, self.out = root / "in", root / "state", root / "out"
        self.letters = root / "letters"
        self.files.mkdir()
        self.source: Callable[[], Any] = lambda: ps.files(self.files, format="csv", schema=SCHEMA)
        self.where: Any = None

    def flow(self) -> ps.Flow:
        flow = ps.Flow("bench")
        stream = flow.source("in", self.source())
        if self.where is not None:
            stream = stream.map_batches("poisoned", self.where, schema=SCHEMA)
        stream.sink("copy", ps.jsonl(str(self.out)))
        flow.dead_letters(ps.jsonl(str(self.letters)))
        return flow

    def start(self, **settings: Any) -> Job:
        hooks = {name: settings.pop(name) for name in ("trip",) if name in settings}
        config = ps.Config(**{"checkpoint": str(self.checkpoint), "epoch_rows": 3, "epochs_in_flight": 1, **settings})
        return start(self.flow(), engine="local", config=config, **hooks)

    def run(self, **settings: Any) -> list[int]:
        self.start(**settings).wait(60)
        return self.rows()

    def die(self, step: str, times: int, **settings: Any) -> None:
        """Run until this step of a commit has come so many times, and end there."""
        seen = [0]

        def trip(name: str) -> None:
            seen[0] += name == step
            if seen[0] == times and name == step:
                raise RuntimeError("killed here")

        with pytest.raises(EngineError, match="killed here"):
            self.start(trip=trip, **settings).wait(60)

    def rows(self) -> list[int]:
        return [row["n"] for row in committed(self.out)]

    def dead(self) -> list[tuple[str, str]]:
        return [(row["offset"].rpartition("/")[2], row["reason"]) for row in committed(self.letters)]

    def csv(self, name: str, *numbers: int) -> Path:
        path = self.files / name
        data = ("n,word\n" + "".join(f"{n},w\n" for n in numbers)).encode()
        path.write_bytes(gzip.compress(data, mtime=0) if name.endswith(".gz") else data)
        return path


def committed(folder: Path) -> list[dict[str, Any]]:
    """The rows of the epochs that are committed: what is being written has a name that is ignored."""
    found = []
    for epoch in sorted(folder.iterdir()) if folder.exists() else ():
        if not epoch.name.startswith(("_", ".")):
            for path in sorted(epoch.glob("*.jsonl")):
                found += [json.loads(line) for line in path.read_text().split("\n") if line]
    return found


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def broken(path: Path) -> bytes:
    """Cut a packed file off. What it was."""
    whole = path.read_bytes()
    path.write_bytes(whole[:-6])
    return whole


# ---- found before it is logged ----


def test_a_file_that_is_cut_off_stops_the_job_and_may_be_replaced(bench: Bench) -> None:
    bench.csv("a.csv", 1, 2)
    path = bench.csv("b.csv.gz", 3, 4)
    whole = broken(path)
    with pytest.raises(SourceError, match=r"b\.csv\.gz cannot be read") as caught:
        bench.run()
    assert "penstock skip" in caught.value.remedy and "dead_letter" in caught.value.remedy
    assert bench.rows() == [1, 2], "what comes before it is read"
    path.write_bytes(whole)
    bench.csv("c.csv", 5)
    assert bench.run() == [1, 2, 3, 4], "listed once"


@pytest.mark.parametrize("then", ["corrected", "removed", "removed, another comes"])
def test_a_followed_directory_with_a_file_that_is_cut_off(bench: Bench, then: str) -> None:
    bench.source = lambda: ps.files(bench.files, format="csv", schema=SCHEMA, follow=True)
    bench.csv("a.csv", 1, 2)
    path = bench.csv("b.csv.gz", 3, 4)
    whole = broken(path)
    with pytest.raises(SourceError, match="cannot be read"):
        bench.run()
    if then == "corrected":
        path.write_bytes(whole)
    else:
        path.unlink()
    if then == "removed, another comes":
        bench.csv("c.csv", 5)
    expected = {"corrected": [1, 2, 3, 4], "removed": [1, 2], "removed, another comes": [1, 2, 5]}[then]
    job = bench.start()
    arrived = threading.Event()
    job._runtime.on_published.append(lambda epoch: arrived.set() if len(bench.rows()) >= len(expected) else None)
    if len(bench.rows()) < len(expected):
        assert arrived.wait(30)
    job.stop()
    assert bench.rows() == expected


@pytest.mark.parametrize("format", ["csv", "parquet"])
def test_a_fault_far_behind_the_head_of_a_file_is_found_before_it_is_logged(tmp_path: Path, format: str) -> None:
    """Packed files are read beforehand in any case, Parquet files where they may be set aside."""
    path = tmp_path / ("a.csv.gz" if format == "csv" else "a.parquet")
    if format == "csv":
        text = "n,word\n" + "".join(f"{n},{n * n % 7919}\n" for n in range(50_000))
        path.write_bytes(gzip.compress(text.encode())[:-100])
    else:
        words = [str(n * n % 7919) for n in range(50_000)]
        pl.DataFrame({"n": range(50_000), "word": words}).write_parquet(path, row_group_size=10_000)
        data = bytearray(path.read_bytes())
        data[len(data) // 2 : len(data) // 2 + 20_000] = b"\xff" * 20_000
        path.write_bytes(data)
    stopping = ps.files(path, format=format, schema=SCHEMA)
    stopping.open(SourceContext("in", None))
    if format == "csv":
        with pytest.raises(SourceError, match="cannot be read"):
            stopping.plan(stopping.initial_offset(), 10)
    patient = ps.files(path, format=format, schema=SCHEMA, on_unreadable="dead_letter")
    patient.open(SourceContext("in", None))
    planned = patient.plan(patient.initial_offset(), 10)
    assert planned is not None and patient.exhausted(planned.end)
    assert "cannot be read" in planned.facts[0]["bad"]


def test_a_file_that_is_replaced_or_goes_before_any_range_enters_it(bench: Bench) -> None:
    bench.csv("a.csv", 1, 2)
    bench.csv("b.csv", 3)
    bench.csv("c.csv", 4)
    source = ps.files(bench.files, format="csv", schema=SCHEMA, follow=True)
    source.open(SourceContext("in", None))
    first = source.plan(source.initial_offset(), 3)
    assert first is not None and source._files[1].size == len("n,word\n3,w\n")
    bench.csv("b.csv", 3, 33)
    (bench.files / "c.csv").unlink()
    second = source.plan(first.end, 3)
    assert second is not None and second.facts[-1]["size"] == len("n,word\n3,w\n33,w\n")
    assert source.plan({"file": 2, "at": 0}, 10) is None


# ---- a verdict that is logged ----


@pytest.mark.parametrize("step", ["before-log", "after-log", "after-publish", "after-manifest"])
@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_verdict_holds_whatever_becomes_of_the_file(bench: Bench, step: str, times: int) -> None:
    bench.source = lambda: ps.files(bench.files, format="csv", schema=SCHEMA, on_unreadable="dead_letter")
    bench.csv("a.csv", 1, 2)
    path = bench.csv("b.csv.gz", 3, 4)
    whole = broken(path)
    bench.csv("c.csv", 5, 6)
    bench.die(step, times, checkpoint_interval_s=0)
    kept = [*bench.checkpoint.glob("log/*"), *bench.checkpoint.glob("manifests/*")]
    logged = any(b"cannot be read" in file.read_bytes() for file in kept)
    path.write_bytes(whole)
    assert bench.run() == ([1, 2, 5, 6] if logged else [1, 2, 3, 4, 5, 6])
    assert len(bench.dead()) == logged
    if logged:
        assert bench.dead()[0][0] == "b.csv.gz:0" and "cannot be read" in bench.dead()[0][1]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("b.csv", b"other,word\n1,a\n"),
        ("b.csv", b"n,n,word\n1,2,a\n"),
        ("b.csv", "n,word\n1,a\n".encode("utf-16")),
        ("b.csv.gz", b"no gzip at all"),
        ("b.csv.gz", gzip.compress(b"n,word\n3,w\n") + b"garbage"),
    ],
)
def test_each_kind_of_unreadable_file_is_one_dead_letter(bench: Bench, name: str, data: bytes) -> None:
    bench.source = lambda: ps.files(bench.files, format="csv", schema=SCHEMA, on_unreadable="dead_letter")
    bench.csv("a.csv", 1)
    (bench.files / name).write_bytes(data)
    bench.csv("c.csv", 2)
    assert bench.run(on_error="fail") == [1, 2]
    assert [offset for offset, _ in bench.dead()] == [f"{name}:0"]


def test_a_file_that_goes_halfway_is_a_dead_letter_from_there_on(bench: Bench) -> None:
    path = bench.csv("a.csv", *range(10))
    source = ps.files(path, format="csv", schema=SCHEMA, on_unreadable="dead_letter")
    source.open(SourceContext("in", None))
    first = source.plan(source.initial_offset(), 4)
    assert first is not None and first.end["file"] == 0
    path.unlink()
    second = source.plan(first.end, 100)
    assert second is not None and source.exhausted(second.end)
    again = ps.files(path, format="csv", schema=SCHEMA, on_unreadable="dead_letter")
    again.open(SourceContext("in", None))
    again.remember(json.loads(json.dumps([*first.facts, *second.facts])))
    for each in (source, again):
        [split] = each.splits(second.start, second.end, 4)
        result = each.read("in", split)
        assert result.frame.height == 0 and not result.bad
        assert [(b.offset, "is gone" in b.reason) for b in result.set_aside] == [(f"{path}:{first.end['at']}", True)]


# ---- orders ----


@pytest.mark.parametrize("change", ["gone", "longer", "damaged"])
def test_an_order_is_the_way_on_when_a_logged_file_went_bad(bench: Bench, change: str) -> None:
    bench.csv("a.csv", 1, 2)
    path = bench.csv("b.csv.gz", 3, 4)
    bench.csv("c.csv", 5, 6)
    bench.die("after-log", 2, checkpoint_interval_s=0)  # the epoch that has b
    size = path.stat().st_size
    if change == "gone":
        path.unlink()
    else:
        path.write_bytes(b"x" * (size + (change == "longer")))
    with pytest.raises(SourceError, match=r"b\.csv\.gz") as caught:
        bench.run()
    assert "penstock skip" in caught.value.remedy
    said = order_skip(str(bench.checkpoint), source=None, file=str(path), offset=None)
    assert "leaves out what is left" in said[0] and "stay in the output" in said[1]
    [name] = (bench.checkpoint / "skips" / "in").iterdir()
    assert stat.S_IMODE(name.stat().st_mode) == 0o600
    bench.die("after-publish", 1)
    job = bench.start()
    job.wait(60)
    assert bench.rows() == [1, 2, 5, 6]
    assert bench.dead() == [("b.csv.gz:0", REASON)]
    assert any("by an order" in notice for notice in job.notices)
    told = CliRunner().invoke(app, ["journal", str(bench.checkpoint)])
    assert "leaves out what is left" in told.output
    assert list_skips(str(bench.checkpoint))[0].startswith("source 'in' leaves out")


def test_what_was_published_of_a_file_stays(bench: Bench) -> None:
    path = bench.csv("a.csv", *range(10))
    bench.csv("b.csv", 10, 11)
    bench.die("after-publish", 3, checkpoint_interval_s=3600)
    before = bench.rows()
    assert 0 < len(before) < 10
    path.write_bytes(b"n,word\n")
    with pytest.raises(SourceError, match="must not change"):
        bench.run()
    order_skip(str(bench.checkpoint), source=None, file=str(path), offset=None)
    assert bench.run() == [*before, 10, 11]
    with pytest.raises(ConfigError, match="covers that part"):
        order_skip(str(bench.checkpoint), source=None, file=str(path), offset="0")


def test_one_record_of_a_file_is_left_out_even_when_errors_are_fatal(bench: Bench) -> None:
    path = bench.csv("a.csv", 1, 2)
    path.write_text('n,word\n1,a\nx,b\n3,"c\nd"\n4,e\n')
    with pytest.raises(BadRecordError) as caught:
        bench.run(on_error="fail")
    file, _, offset = str(caught.value.evidence["offset"]).rpartition(":")
    assert (file, offset) == (str(path), "11")
    order_skip(str(bench.checkpoint), source="in", file=file, offset=offset)
    order_skip(str(bench.checkpoint), source="in", file=file, offset="18")  # within the record that begins at 15
    assert bench.run(on_error="fail") == [1, 4]
    assert bench.dead() == [("a.csv:11", REASON), ("a.csv:15", REASON)]


def poison(frame: pl.DataFrame) -> pl.DataFrame:
    if (frame["n"] == 13).any():
        raise ValueError("I cannot bear 13")
    return frame


@pytest.mark.parametrize("kind", ["generator", "iterator", "parquet"])
def test_a_poison_record_of_any_source(bench: Bench, kind: str) -> None:
    frame = pl.DataFrame({"n": range(20), "word": ["w"] * 20})
    frame.write_parquet(bench.files / "a.parquet")

    def rows(first: int, n: int, rng: Any) -> pl.DataFrame:
        return pl.DataFrame({"n": range(first, first + n), "word": ["w"] * n})

    bench.source = {
        "generator": lambda: ps.generator(rows, rows=20),
        "iterator": lambda: ps.iterator(lambda skip: frame.rows()[skip:], SCHEMA),
        "parquet": lambda: ps.files(bench.files, format="parquet", schema=SCHEMA),
    }[kind]
    bench.where = poison
    with pytest.raises(PenstockError, match="I cannot bear 13"):
        bench.run()
    if kind == "iterator":
        places = [
            f"{int(p.stem)}:{row}" for p in (bench.checkpoint / "spool" / "in").glob("*.arrow") for row in range(20)
        ]
        bad = [place for place in places if _number_at(bench, place) == 13]
        assert len(bad) == 1
        order_skip(str(bench.checkpoint), source="in", file=None, offset=bad[0])
    else:
        file = str(bench.files / "a.parquet") if kind == "parquet" else None
        order_skip(str(bench.checkpoint), source="in", file=file, offset="13")
    assert bench.run() == [n for n in range(20) if n != 13]
    assert [reason for _, reason in bench.dead()] == [REASON]


class Reader:
    """What PySpark calls a simple stream reader: two batches of three rows, as tuples and as Arrow."""

    def initialOffset(self) -> dict[str, int]:
        return {"at": 0}

    def read(self, start: dict[str, int]) -> tuple[Any, dict[str, int]]:
        end = {"at": min(6, start["at"] + 6)}
        return iter(self.readBetweenOffsets(start, end)), end

    def readBetweenOffsets(self, start: dict[str, int], end: dict[str, int]) -> list[Any]:
        batch = pa.RecordBatch.from_pydict({"n": [3, 4, 5], "word": ["w"] * 3})
        return [(0, "w"), (1, "w"), (2, "w"), batch] if start != end else []


def test_a_record_of_a_reader_is_left_out_by_the_place_that_dead_letters_show() -> None:
    store = MemoryStore()
    for place in ('{"at": 6}:1', '{"at": 6}:4'):
        write_skip(store, Skip("in", None, place, None, "2026-01-01T00:00:00Z"))
    source = ps.simple_reader(Reader(), "n bigint, word string")
    source.open(SourceContext("in", None, None, store))
    planned = source.plan(source.initial_offset(), 100)
    assert planned is not None and len(source.notices) == 2
    [split] = source.splits(planned.start, planned.end, 1)
    result = source.read("in", json.loads(json.dumps(split)))
    assert result.frame["n"].to_list() == [0, 2, 3, 5] and not result.bad
    assert [b.offset for b in result.set_aside] == ['{"at": 6}:1', '{"at": 6}:4']


def _number_at(bench: Bench, place: str) -> int | None:
    from penstock.connectors.spool import decode_segment

    number, _, row = place.partition(":")
    name = f"spool/in/{int(number):012d}.arrow"
    frame, _ = decode_segment((bench.checkpoint / name).read_bytes(), name)
    return frame["n"][int(row)] if int(row) < frame.height else None


def test_what_an_order_may_not_say(bench: Bench, tmp_path: Path) -> None:
    place = str(bench.checkpoint)
    with pytest.raises(ConfigError, match="no job has kept"):
        order_skip(place, source=None, file="x", offset=None)
    bench.csv("a.csv", 1, 2)
    bench.csv("b.csv", 3)
    bench.run(checkpoint_interval_s=0)
    file = str(bench.files / "a.csv")
    for arguments, says in (
        ({}, "needs --file or --offset"),
        ({"file": str(tmp_path / "other.csv")}, "no source has logged"),
        ({"source": "out", "file": file}, "nothing is logged of a source 'out'"),
        ({"offset": "1"}, "reads files"),
        ({"file": file, "offset": "-1"}, "not a whole number"),
        ({"file": file}, "covers that part"),
    ):
        with pytest.raises(ConfigError, match=says) as caught:
            order_skip(place, **{"source": None, "file": None, "offset": None, **arguments})
        assert caught.value.remedy
    assert list_skips(place) == []


def test_a_job_that_runs_takes_no_order(bench: Bench) -> None:
    file = bench.csv("a.csv", 1)
    bench.die("after-log", 1)
    with DirectoryLock(str(bench.checkpoint), job="it runs"), pytest.raises(CheckpointInUse, match="it runs"):
        order_skip(str(bench.checkpoint), source="in", file=str(file), offset=None)
    assert list_skips(str(bench.checkpoint)) == []


def test_orders_are_kept_apart_and_a_damaged_one_is_named() -> None:
    store = MemoryStore()
    first = Skip("a b", None, "1", None, "2026-01-01T00:00:00Z")
    other = Skip("a_b", None, "2", None, "2026-01-01T00:00:00Z")
    write_skip(store, first)
    name = write_skip(store, other)  # in the same folder, for both names become that
    assert read_skips(store, "a b") == [first] and read_skips(store, "a_b") == [other]
    store.put(name, store.get(name)[:-1] + b"x")
    with pytest.raises(CorruptData, match="damaged"):
        read_skips(store, "a b")


def test_the_command(bench: Bench) -> None:
    path = bench.csv("a.csv.gz", 1, 2)
    bench.die("after-log", 1)
    path.unlink()
    place = str(bench.checkpoint)
    run = CliRunner().invoke
    assert run(app, ["skip", place]).output == "Nothing is left out.\n"
    done = run(app, ["skip", place, "--file", str(path)])
    assert done.exit_code == 0 and "leaves out what is left" in done.output
    assert "leaves out what is left" in run(app, ["skip", place]).output
    assert run(app, ["skip", place, "--file", "nowhere.csv"]).exit_code == 2
    assert bench.run() == []
    assert bench.dead() == [("a.csv.gz:0", REASON)]
