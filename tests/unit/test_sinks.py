"""Sinks: an epoch is visible as a whole or not at all, once, and only in a directory that is ours."""

from __future__ import annotations

import datetime as dt
import errno
import io
import json
import os
import pickle
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from penstock.connectors import (
    Sink,
    SinkContext,
    console,
    csv,
    discard,
    files,
    foreach_batch,
    jsonl,
    memory,
    parquet,
    read_output,
)
from penstock.connectors.base import SourceContext
from penstock.errors import SinkError, StorageFull, UserCodeError

FRAME = pl.DataFrame(
    {
        "word": ["a", None, 'c,"d"\u00e9'],
        "n": [1, 2, None],
        "x": [0.1, 1e300, -0.0],
        "ts": [dt.datetime(2024, 1, 1, 1, 2, 3, 456), None, dt.datetime(1969, 1, 1)],
        "utc": [dt.datetime(2024, 1, 1, tzinfo=dt.UTC)] * 3,
        "day": [dt.date(2024, 1, 1)] * 3,
        "ok": [True, False, None],
        "took": [dt.timedelta(microseconds=5), None, dt.timedelta(days=1)],
    }
)
MAKERS = {"parquet": parquet, "csv": csv, "jsonl": jsonl}
formats = pytest.mark.parametrize("format", MAKERS)


def context(frame: pl.DataFrame = FRAME, **changes: Any) -> SinkContext:
    return SinkContext(**{"sink_id": "out", "job_id": "job-1", "schema": frame.schema, **changes})


def stage(sink: Sink, epoch: int, attempt: int, frames: dict[str, pl.DataFrame]) -> list[Any]:
    worker = pickle.loads(pickle.dumps(sink))
    return json.loads(json.dumps([worker.write_part(epoch, attempt, part, f) for part, f in frames.items()]))


def run(sink: Sink, epoch: int, attempt: int = 1, **frames: pl.DataFrame) -> None:
    sink.commit(epoch, attempt, stage(sink, epoch, attempt, {k.lstrip("p"): f for k, f in frames.items()}))


def visible(path: Path) -> dict[str, bytes]:
    """What a reader who ignores ``_`` and ``.`` sees."""
    found = sorted(p for p in path.rglob("*") if p.is_file())
    relative = {str(p.relative_to(path)): p for p in found}
    return {n: p.read_bytes() for n, p in relative.items() if not any(x.startswith(("_", ".")) for x in n.split("/"))}


# ------------------------------------------------------------ directories


@formats
def test_what_is_written_is_read_back(tmp_path: Path, format: str) -> None:
    out = tmp_path / "out"
    sink = MAKERS[format](out)
    sink.open(context())
    assert read_output(out).height == 0 and read_output(out).columns == ["epoch", *FRAME.columns]
    run(sink, 1, p2=FRAME[:1], p10=FRAME[1:])
    run(sink, 2, p0=FRAME[:0])  # empty: no directory
    run(sink, 12, p0=FRAME)
    assert list(visible(out)) == [
        f"epoch=000000000001/part-10.{format}",
        f"epoch=000000000001/part-2.{format}",
        f"epoch=000000000012/part-0.{format}",
    ]
    expected = pl.concat([FRAME.select(pl.lit(e, dtype=pl.Int64).alias("epoch"), pl.all()) for e in (1, 12)])
    assert_frame_equal(read_output(out), expected)


@formats
def test_the_same_rows_give_the_same_bytes(tmp_path: Path, format: str) -> None:
    chunks = pl.concat([FRAME[:1], FRAME[1:2], FRAME[2:]])
    assert chunks.n_chunks() == 3
    for name, frame in (("a", FRAME), ("b", chunks)):
        sink = MAKERS[format](tmp_path / name)
        sink.open(context())
        run(sink, 1, p0=frame)
    assert visible(tmp_path / "a") == visible(tmp_path / "b")


def test_text_forms_are_fixed(tmp_path: Path) -> None:
    for maker, line in (
        (csv, "a,1,0.1,2024-01-01T01:02:03.000456,2024-01-01T00:00:00.000000Z,2024-01-01,true,5"),
        (
            jsonl,
            '{"word":"a","n":1,"x":0.1,"ts":"2024-01-01T01:02:03.000456","utc":"2024-01-01T00:00:00.000000Z",'
            '"day":"2024-01-01","ok":true,"took":5}',
        ),
    ):
        out = tmp_path / maker.__name__
        sink = maker(out)
        sink.open(context())
        run(sink, 1, p0=FRAME[:1])
        [data] = visible(out).values()
        assert data.decode().splitlines()[-1] == line


@formats
def test_nothing_is_visible_before_the_commit(tmp_path: Path, format: str) -> None:
    out = tmp_path / "out"
    sink = MAKERS[format](out)
    sink.open(context())
    stage(sink, 1, 1, {"0": FRAME, "1": FRAME})
    assert visible(out) == {}
    assert read_output(out).height == 0
    # The driver dies here and comes back: leftovers are cleaned, the rerun of the epoch counts.
    again = MAKERS[format](out)
    again.open(context(resumed=True))
    assert not (out / "_staging").exists()
    run(again, 1, 2, p0=FRAME[:1])
    assert_frame_equal(read_output(out).drop("epoch"), FRAME[:1])


def test_a_crash_in_the_rename_leaves_nothing_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    sink = parquet(out)
    sink.open(context())
    parts = stage(sink, 1, 1, {"0": FRAME})

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", crash)
        with pytest.raises(KeyboardInterrupt):
            sink.commit(1, 1, parts)
    assert visible(out) == {}
    sink.commit(1, 1, parts)
    assert len(visible(out)) == 1


@formats
def test_a_second_commit_changes_nothing(tmp_path: Path, format: str) -> None:
    out = tmp_path / "out"
    sink = MAKERS[format](out)
    sink.open(context())
    parts = stage(sink, 1, 1, {"0": FRAME})
    sink.commit(1, 1, parts)
    before = visible(out)
    sink.commit(1, 1, parts)
    run(sink, 1, 2, p0=FRAME[:1], p1=FRAME)  # a later attempt, other parts
    assert visible(out) == before
    assert list((out / "_staging").iterdir()) == []


def test_only_the_listed_parts_of_the_attempt_count(tmp_path: Path) -> None:
    out = tmp_path / "out"
    sink = parquet(out)
    sink.open(context())
    stage(sink, 1, 1, {"0": FRAME})  # an older attempt
    stage(sink, 1, 2, {"9": FRAME})  # a task whose result was not used
    sink.commit(1, 2, stage(sink, 1, 2, {"0": FRAME[:1]}))
    assert list(visible(out)) == ["epoch=000000000001/part-0.parquet"]
    assert_frame_equal(read_output(out).drop("epoch"), FRAME[:1])


def test_a_task_that_was_given_up_leaves_nothing_behind(tmp_path: Path) -> None:
    out = tmp_path / "out"
    sink = parquet(out)
    sink.open(context())
    run(sink, 1, 1, p0=FRAME)
    stage(sink, 1, 1, {"1": FRAME})  # it writes when its epoch is committed already
    (out / "_staging" / ".keep").touch()
    stage(sink, 3, 1, {"0": FRAME})  # an epoch to come
    run(sink, 2, 1, p0=FRAME)
    assert sorted(os.listdir(out / "_staging")) == [".keep", "3-1"]


def test_a_part_that_is_missing(tmp_path: Path) -> None:
    sink = parquet(tmp_path / "out")
    sink.open(context())
    with pytest.raises(SinkError, match=r"part-7\.parquet is not in .*shared file system"):
        sink.commit(1, 1, [{"file": "part-7.parquet", "rows": 1}])


def test_directories_of_others_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    parquet(out).open(context())
    parquet(out).open(context())  # our own, again
    with pytest.raises(SinkError, match=r"another job \(job-1\).*another directory.*delete.*checkpoint"):
        parquet(out).open(context(job_id="job-2"))
    with pytest.raises(SinkError, match=r"belongs to sink 'out'.*directory of its own"):
        parquet(out).open(context(sink_id="other"))
    with pytest.raises(SinkError, match="belongs to sink 'out'"):
        csv(out).open(context(FRAME))
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("precious")
    with pytest.raises(SinkError, match="not empty"):
        parquet(foreign).open(context())
    assert [p.name for p in foreign.iterdir()] == ["thesis.txt"]
    (tmp_path / "file").write_text("x")
    with pytest.raises(SinkError, match="cannot be used"):
        parquet(tmp_path / "file").open(context())
    with pytest.raises(SinkError, match="not the output of a Penstock job"):
        read_output(foreign)


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = parquet(tmp_path / "out")
    sink.open(context())

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageFull, match="No room left") as caught:
        sink.write_part(1, 1, "0", FRAME)
    assert caught.value.evidence["path"] == str(tmp_path / "out")
    assert [p for p in (tmp_path / "out").rglob("*") if "part" in p.name] == [], "no half file stays"


def test_csv_refuses_nested_columns(tmp_path: Path) -> None:
    nested = pl.DataFrame({"l": [[1]]})
    with pytest.raises(SinkError, match=r"column 'l'.*jsonl"):
        csv(tmp_path / "a").open(context(nested))
    sink = jsonl(tmp_path / "b")
    sink.open(context(nested))
    run(sink, 1, p0=nested)
    assert_frame_equal(read_output(tmp_path / "b").drop("epoch"), nested)


def test_an_epoch_column_of_ones_own(tmp_path: Path) -> None:
    frame = pl.DataFrame({"epoch": [7]})
    sink = parquet(tmp_path / "out")
    sink.open(context(frame))
    run(sink, 1, p0=frame)
    with pytest.raises(SinkError, match="epoch_column="):
        read_output(tmp_path / "out")
    assert read_output(tmp_path / "out", epoch_column="_epoch").rows() == [(1, 7)]


@formats
def test_one_job_reads_what_another_writes(tmp_path: Path, format: str) -> None:
    out = tmp_path / "out"
    sink = MAKERS[format](out)
    plain = FRAME.select("word", "n", "ts")
    sink.open(context(plain))
    source = files(out, format=format, follow=True, schema=plain.schema)
    source.open(SourceContext("in", None))
    at, frames = source.initial_offset(), []
    for epoch in (1, 2):
        stage(sink, epoch, 1, {"1": plain})
        assert source.plan(at, 100) is None
        run(sink, epoch, 2, p0=plain[epoch:])
        planned = source.plan(at, 100)
        assert planned is not None
        frames += [source.read("in", s).frame for s in source.splits(planned.start, planned.end, 1)]
        at = planned.end
    assert_frame_equal(pl.concat(frames), pl.concat([plain[1:], plain[2:]]))


# ------------------------------------------------------------ object stores


@formats
def test_an_object_store(tmp_path: Path, format: str) -> None:
    out = f"memory://{tmp_path.name}-{format}/out"
    sink = MAKERS[format](out)
    sink.open(context())
    parts = stage(sink, 1, 1, {"0": FRAME})
    assert read_output(out).height == 0, "written, not committed"
    stage(sink, 1, 2, {"0": FRAME[:2]})
    sink.commit(1, 1, parts)
    sink.commit(1, 2, stage(sink, 1, 2, {"0": FRAME[:1]}))  # too late
    run(sink, 2, 1, p0=FRAME[:0])
    run(sink, 3, 1, p0=FRAME[:1])
    assert_frame_equal(read_output(out).drop("epoch"), pl.concat([FRAME, FRAME[:1]]))
    assert read_output(out)["epoch"].to_list() == [1, 1, 1, 3]
    MAKERS[format](out).open(context(resumed=True))
    with pytest.raises(SinkError, match="another job"):
        MAKERS[format](out).open(context(job_id="job-2"))


def test_an_object_store_keeps_no_parts_of_attempts_that_were_given_up(tmp_path: Path) -> None:
    import fsspec

    out = f"memory://{tmp_path.name}/out"
    sink = parquet(out)
    sink.open(context())
    stage(sink, 1, 1, {"0": FRAME, "1": FRAME})
    run(sink, 1, 2, p0=FRAME[:2])
    run(sink, 1, 3, p0=FRAME[:2], p1=FRAME[:0])  # the driver had died before it could say that epoch 1 is there
    stage(sink, 2, 3, {"0": FRAME})
    sink.commit(2, 4, [])
    left = [name.partition("/out/")[2] for name in fsspec.filesystem("memory").find(f"/{tmp_path.name}/out")]
    assert left == ["_committed/000000000001.json", "_penstock.json", "epoch=000000000001/part-0.a2.parquet"]
    assert_frame_equal(read_output(out).drop("epoch"), FRAME[:2])


def test_a_part_that_an_object_store_will_not_remove_fails_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    def refuse(self: MemoryFileSystem, path: str) -> None:
        raise PermissionError(path)

    out = f"memory://{tmp_path.name}/out"
    sink = parquet(out)
    sink.open(context())
    monkeypatch.setattr(MemoryFileSystem, "rm_file", refuse)
    for attempt in (1, 2):
        run(sink, 1, attempt, p0=FRAME)
    assert_frame_equal(read_output(out).drop("epoch"), FRAME)


# ------------------------------------------------------------ on the driver


def test_memory() -> None:
    sink = memory()
    assert sink.collects
    sink.open(context())
    assert sink.frame().schema == FRAME.schema
    sink.write(2, FRAME[1:])
    sink.write(1, FRAME[:1])
    sink.write(1, FRAME)  # again: nothing
    assert_frame_equal(sink.frame(), FRAME)
    sink.open(context(resumed=True))
    assert sorted(sink.epochs) == [1, 2]
    sink.open(context())
    assert sink.epochs == {}


def test_console() -> None:
    out = io.StringIO()
    sink = console(rows=2, file=out)
    sink.open(context())
    sink.write(1, FRAME.select("word", "n"))
    sink.write(1, FRAME.select("word", "n"))
    sink.write(2, FRAME[:0])
    text = out.getvalue()
    assert text.startswith("out, epoch 1 (1 more rows)\n") and text.count("epoch") == 1 and "null" in text


def test_foreach_batch() -> None:
    seen: list[tuple[int, int]] = []
    fail = [True]

    def collect(epoch: int, frame: pl.DataFrame) -> None:
        if epoch == 2 and fail:
            fail.pop()
            raise ValueError("no")
        seen.append((epoch, frame.height))

    sink = foreach_batch(collect)
    sink.open(context())
    sink.write(1, FRAME)
    sink.write(1, FRAME)
    with pytest.raises(UserCodeError, match=r"sink 'out' failed in epoch 2: ValueError: no") as caught:
        sink.write(2, FRAME)
    assert caught.value.evidence["epoch"] == 2
    sink.write(2, FRAME)
    assert seen == [(1, 3), (2, 3)]


def test_discard() -> None:
    sink = discard()
    assert not sink.collects
    sink.open(context())
    run(sink, 1, p0=FRAME, p1=FRAME[:0], p2=FRAME)
    run(sink, 1, 2, p0=FRAME)
    run(sink, 2, 2, p0=FRAME)
    assert sink.rows == 9


def test_every_connector_describes_itself(tmp_path: Path) -> None:
    for thing in (
        parquet(tmp_path),
        memory(),
        console(),
        foreach_batch(print),
        discard(),
        files(tmp_path, format="text"),
    ):
        assert thing.describe() and "object at" not in thing.describe()
