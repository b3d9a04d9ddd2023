"""Connectors that talk to Spark: readers of the Python data source API, streaming DataFrames, tables."""

from __future__ import annotations

import datetime as dt
import json
import pickle
import threading
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from polars.testing import assert_frame_equal
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition, SimpleDataSourceStreamReader
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows
from pyspark.sql.types import StructType

from penstock.connectors import (
    ReadResult,
    SinkContext,
    Source,
    SourceContext,
    dataframe,
    dataframe_writer,
    simple_reader,
    spark_reader,
    spark_table,
)
from penstock.connectors.spark_sources import spark_schema
from penstock.errors import FlowError, SinkError, SourceError, UserCodeError

pytestmark = pytest.mark.spark

WAIT_S = 240.0


@pytest.fixture(scope="module")
def spark(session: SparkSession) -> SparkSession:
    session.sparkContext.setLogLevel("OFF")
    return session


def read_all(source: Source, start: Any, end: Any, parallelism: int) -> ReadResult:
    worker = pickle.loads(pickle.dumps(source))
    splits = json.loads(json.dumps(source.splits(start, end, parallelism)))
    assert 1 <= len(splits) <= parallelism
    results = [worker.read("in", split) for split in splits]
    return ReadResult(pl.concat([r.frame for r in results]), tuple(b for r in results for b in r.bad))


# ------------------------------------------------------------ readers


class Part(InputPartition):
    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last


class Counter(DataSourceStreamReader):
    """Numbers up to 1000, as many partitions as there are tens; odd ones as tuples, even ones as Arrow."""

    def __init__(self) -> None:
        self.committed: list[dict[str, int]] = []
        self.stopped = False

    def initialOffset(self) -> dict[str, int]:
        return {"at": 0}

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(100)

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:
        assert isinstance(limit, ReadMaxRows)
        return {"at": min(1000, start["at"] + limit.max_rows)}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        return [Part(i, min(i + 10, end["at"])) for i in range(start["at"], end["at"], 10)]

    def read(self, partition: Part) -> Iterator[Any]:  # type: ignore[override]
        numbers = range(partition.first, partition.last)
        if partition.first // 10 % 2:
            yield from ((n, f"n{n}") for n in numbers)
        else:
            yield pa.record_batch({"word": [f"n{n}" for n in numbers], "n": pa.array(numbers, pa.int32())})

    def commit(self, end: dict[str, int]) -> None:
        self.committed.append(end)

    def stop(self) -> None:
        self.stopped = True


def test_a_reader_is_read_like_any_source() -> None:
    reader = Counter()
    source = spark_reader(reader, "n bigint, word string")
    at, frames, sizes = source.initial_offset(), [], []
    while (planned := source.plan(at, 70)) is not None:
        one = read_all(source, planned.start, planned.end, 1)
        many = read_all(source, planned.start, planned.end, 3)
        assert_frame_equal(one.frame, many.frame)
        assert not one.bad
        frames.append(one.frame)
        sizes.append(planned.rows_estimate)
        at = planned.end
    assert max(sizes) == 70
    assert pl.concat(frames).rows() == [(n, f"n{n}") for n in range(1000)]
    source.committed(at)
    source.close()
    assert reader.committed == [{"at": 1000}] and reader.stopped


class Odd(Counter):
    """The signature of Spark 4.0, and rows that do not fit."""

    def latestOffset(self) -> dict[str, int]:  # type: ignore[override]
        return {"at": 4}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        return [Part(0, 1), Part(1, 2)]

    def read(self, partition: Part) -> Iterator[Any]:  # type: ignore[override]
        if partition.first:
            yield pa.record_batch({"n": ["7", "x"], "word": ["g", "h"]})
        else:
            yield from [(1, "a"), (2.5, "b"), (3,), ("4", "d"), (True, "e"), (6, None), "text"]


def test_rows_that_do_not_fit() -> None:
    source = spark_reader(Odd(), {"n": int, "word": str})
    planned = source.plan(source.initial_offset(), 70)
    assert planned is not None
    result = read_all(source, planned.start, planned.end, 2)
    assert result.frame.rows() == [(1, "a"), (6, None), (7, "g")]
    assert [(b.offset, b.raw) for b in result.bad] == [
        ('{"at": 4}:0:1', "(2.5, 'b')"),
        ('{"at": 4}:0:2', "(3,)"),
        ('{"at": 4}:0:3', "('4', 'd')"),
        ('{"at": 4}:0:4', "(True, 'e')"),
        ('{"at": 4}:0:6', "'text'"),
        ('{"at": 4}:1:1', "('x', 'h')"),
    ]
    assert source.plan(planned.end, 70) is None


class Simple(SimpleDataSourceStreamReader):
    def initialOffset(self) -> dict[str, int]:
        return {"at": 0}

    def read(self, start: dict[str, int]) -> tuple[Iterator[tuple[int]], dict[str, int]]:
        end = {"at": min(5, start["at"] + 3)}
        return self.readBetweenOffsets(start, end), end

    def readBetweenOffsets(self, start: dict[str, int], end: dict[str, int]) -> Iterator[tuple[int]]:
        return iter([(n,) for n in range(start["at"], end["at"])])


def test_a_simple_reader() -> None:
    source = simple_reader(Simple(), "n int")
    at, seen = source.initial_offset(), []
    while (planned := source.plan(at, 70)) is not None:
        result = read_all(source, planned.start, planned.end, 4)
        assert result.frame.height == planned.rows_estimate
        seen += result.frame["n"].to_list()
        at = planned.end
    assert seen == [0, 1, 2, 3, 4]


class Broken(Counter):
    def read(self, partition: Part) -> Iterator[Any]:  # type: ignore[override]
        yield (1, "a")
        raise ConnectionError("the broker is away")


def test_a_reader_that_fails() -> None:
    source = spark_reader(Broken(), "n bigint, word string")
    planned = source.plan(source.initial_offset(), 10)
    assert planned is not None
    with pytest.raises(SourceError, match="the broker is away") as caught:
        read_all(source, planned.start, planned.end, 1)
    assert caught.value.remedy
    with pytest.raises(FlowError, match=r"no method initialOffset"):
        spark_reader(object(), "n int")


DDL = (
    "a int not null, b array<string>, `c d` decimal(10,2), e struct<x:int,y:array<double>>, "
    "t timestamp, u timestamp_ntz"
)


def test_schemas(spark: SparkSession) -> None:
    expected = pl.Schema(
        {
            "a": pl.Int32(),
            "b": pl.List(pl.String()),
            "c d": pl.Decimal(10, 2),
            "e": pl.Struct({"x": pl.Int32(), "y": pl.List(pl.Float64())}),
            "t": pl.Datetime("us", "UTC"),
            "u": pl.Datetime("us"),
        }
    )
    assert spark_schema(DDL) == expected
    assert spark_schema(StructType.fromDDL(DDL)) == expected
    with pytest.raises(FlowError, match=r"Column 'm': the Spark type 'map<string,int>'"):
        spark_schema("m map<string,int>")


# ------------------------------------------------------------ streaming DataFrames


def write_inputs(folder: Path, first: int, last: int) -> None:
    folder.mkdir(exist_ok=True)
    for i in range(first, last):
        rows = [{"n": 10 * i + k, "t": "2024-01-01 00:00:00.000005"} for k in range(10)]
        temporary = folder / f".{i}.tmp"
        temporary.write_text("".join(json.dumps(r) + "\n" for r in rows))
        temporary.rename(folder / f"{i:03}.json")


def stream(spark: SparkSession, folder: Path) -> Any:
    reader = spark.readStream.schema("n bigint, t timestamp").option("maxFilesPerTrigger", 1)
    return reader.json(str(folder))


def spooled(source: Any, start: Any) -> Any:
    """The next range. Spark makes progress in its own threads: ask until it is there."""
    tick, waited = threading.Event(), 0.0
    while (planned := source.plan(start, 10)) is None and not source.exhausted(start):
        assert waited < WAIT_S, "Spark spooled nothing"
        tick.wait(0.02)
        waited += 0.02
    return planned


def test_a_streaming_dataframe(spark: SparkSession, tmp_path: Path) -> None:
    write_inputs(tmp_path / "in", 0, 4)
    checkpoint = str(tmp_path / "checkpoint")
    source = dataframe(stream(spark, tmp_path / "in"), trigger={"availableNow": True})
    assert source.schema() == pl.Schema({"n": pl.Int64(), "t": pl.Datetime("us", "UTC")})
    source.open(SourceContext("in/1", checkpoint, spark))
    at, log, seen = source.initial_offset(), [], []
    for _ in range(2):
        planned = spooled(source, at)
        log.append(planned)
        one = read_all(source, planned.start, planned.end, 1).frame
        assert_frame_equal(one, read_all(source, planned.start, planned.end, 3).frame)
        seen.append(one)
        at = planned.end
    assert at == {"batch": 2}
    source.committed({"batch": 1})
    source.close()
    spool = tmp_path / "checkpoint" / "spool" / "in_1"
    assert not (spool / "batch=0").exists() and (spool / "batch=1").exists()

    # A restart: the range that no checkpoint covers is read again, then the rest; more input has come meanwhile.
    write_inputs(tmp_path / "in", 4, 6)
    again = dataframe(stream(spark, tmp_path / "in"), trigger={"availableNow": True})
    again.open(SourceContext("in/1", checkpoint, spark))
    assert_frame_equal(read_all(again, log[1].start, log[1].end, 2).frame, seen[1])
    while (planned := spooled(again, at)) is not None:
        seen.append(read_all(again, planned.start, planned.end, 2).frame)
        at = planned.end
    again.close()
    whole = pl.concat(seen)
    assert sorted(whole["n"].to_list()) == list(range(60))
    assert whole["t"].unique().to_list() == [dt.datetime(2024, 1, 1, 0, 0, 0, 5, tzinfo=dt.UTC)]


def test_spark_waits_for_a_slow_reader(spark: SparkSession, tmp_path: Path) -> None:
    write_inputs(tmp_path / "in", 0, 5)
    source = dataframe(stream(spark, tmp_path / "in"), unread_max=1)
    source.open(SourceContext("in", str(tmp_path / "checkpoint"), spark))
    at = source.initial_offset()
    for batch in range(1, 4):
        planned = spooled(source, at)
        at = planned.end
        assert at == {"batch": batch}, "one batch at a time: the next waits until this one is taken"
    source.close()  # while Spark waits: it must not hang
    assert source.exhausted(at) is False


def test_a_batch_is_spooled_once(spark: SparkSession, tmp_path: Path) -> None:
    write_inputs(tmp_path / "in", 0, 1)
    source = dataframe(stream(spark, tmp_path / "in"))
    source.open(SourceContext("in", str(tmp_path / "checkpoint"), spark))
    planned = spooled(source, source.initial_offset())
    before = read_all(source, planned.start, planned.end, 1).frame
    other = spark.createDataFrame([(99, None)], "n bigint, t timestamp")
    source._spool(other, 0)  # Spark runs the batch again after a failure
    assert_frame_equal(read_all(source, planned.start, planned.end, 1).frame, before)
    source.committed(planned.end)
    source._spool(other, 0)
    assert not (tmp_path / "checkpoint" / "spool" / "in" / "batch=0").exists()
    source.close()


def test_a_query_that_fails(spark: SparkSession, tmp_path: Path) -> None:
    write_inputs(tmp_path / "in", 0, 1)
    sdf = stream(spark, tmp_path / "in").selectExpr("raise_error('the pump is dry') as x")
    sdf = sdf.selectExpr("cast(x as string) as x")
    source = dataframe(sdf)
    source.open(SourceContext("in", None, spark))  # no checkpoint: a temporary spool
    root = Path(source._root)
    assert root.exists()
    with pytest.raises(SourceError, match="the pump is dry"):
        spooled(source, source.initial_offset())
    source.close()
    assert not root.exists()


def test_only_streams(spark: SparkSession) -> None:
    with pytest.raises(FlowError, match="streaming DataFrame"):
        dataframe(spark.range(3))


# ------------------------------------------------------------ sinks

FRAME = pl.DataFrame(
    {
        "word": ["a", "b"],
        "n": pl.Series([1, 2], dtype=pl.UInt32),
        "big": pl.Series([2**64 - 1, 0], dtype=pl.UInt64),
        "ts": [dt.datetime(2024, 1, 1), None],
        "kind": pl.Series(["x", None], dtype=pl.Categorical),
        "tags": pl.Series([[1], []], dtype=pl.List(pl.UInt8)),
    }
)


def context(spark: SparkSession, **changes: Any) -> SinkContext:
    return SinkContext(**{"sink_id": "out", "job_id": "job-1", "schema": FRAME.schema, "spark": spark, **changes})


def test_a_table(spark: SparkSession) -> None:
    sink = spark_table("counts")
    sink.open(context(spark))
    sink.write(1, FRAME)
    sink.write(1, FRAME)
    sink.write(2, FRAME[:0])
    sink.write(3, FRAME[:1])
    # The driver comes back and is not sure of epoch 3.
    again = spark_table("counts")
    again.open(context(spark, resumed=True))
    again.write(3, FRAME[:1])
    again.write(4, FRAME[:1])
    rows = spark.sql("SELECT epoch, word, n, big, ts, kind, tags FROM counts ORDER BY epoch, word").collect()
    a = ("a", 1, Decimal(2**64 - 1), dt.datetime(2024, 1, 1), "x", [1])
    assert [tuple(r) for r in rows] == [(1, *a), (1, "b", 2, Decimal(0), None, None, []), (3, *a), (4, *a)]
    with pytest.raises(SinkError, match=r"counts belongs to job-1/out"):
        spark_table("counts").open(context(spark, job_id="job-2"))
    spark.sql("CREATE TABLE theirs (x int) USING parquet")
    with pytest.raises(SinkError, match="not made by Penstock"):
        spark_table("theirs").open(context(spark))
    with pytest.raises(SinkError, match="epoch_column"):
        spark_table("mine").open(context(spark, schema=pl.Schema({"epoch": pl.Int64()})))
    with pytest.raises(FlowError, match="not the name of a table"):
        spark_table("x; drop table y")


def test_a_dataframe_writer(spark: SparkSession) -> None:
    seen: list[tuple[int, list[str]]] = []

    def keep(epoch: int, sdf: Any) -> None:
        seen.append((epoch, [r.word for r in sdf.orderBy("word").collect()]))

    sink = dataframe_writer(keep)
    sink.open(context(spark))
    for epoch in (1, 1, 2):
        sink.write(epoch, FRAME)
    assert seen == [(1, ["a", "b"]), (2, ["a", "b"])]
    broken = dataframe_writer(lambda epoch, sdf: 1 / 0)
    broken.open(context(spark))
    with pytest.raises(UserCodeError, match="sink 'out' failed in epoch 1"):
        broken.write(1, FRAME)
