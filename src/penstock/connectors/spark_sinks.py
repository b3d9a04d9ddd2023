"""Outputs through Spark: a table of its catalogue, or whatever a user's function does with a Spark DataFrame.

Both collect: the epoch's table is on the driver and goes to Spark by Arrow. That is right for results (counts,
alerts, top-k); for bulk output use ``ps.parquet``, which workers write themselves.

``spark_table`` keeps each epoch in a partition of its own and *overwrites that partition*. An append could be half
done when the driver dies; an overwrite is done again and gives the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import polars as pl

from penstock.connectors.base import Sink, SinkContext
from penstock.connectors.sinks import call_user
from penstock.errors import FlowError, SinkError

JOB_PROPERTY = "penstock.job"


def spark_table(name: str, *, epoch_column: str = "epoch", format: str = "parquet") -> SparkTableSink:
    """Write to the Spark table ``name``, made if it is not there, partitioned by ``epoch_column``."""
    if not re.fullmatch(r"[\w`]+(\.[\w`]+){0,2}", name):
        raise FlowError(f"{name!r} is not the name of a table.", remedy='Write for example "counts" or "db.counts".')
    return SparkTableSink(name, epoch_column, format)


def dataframe_writer(fn: Callable[[int, Any], object]) -> DataFrameWriterSink:
    """Call ``fn(epoch, spark_dataframe)`` on the driver for each epoch that has rows.

    After a restart the last epochs may come again with the same number and rows: make ``fn`` idempotent by epoch.
    """
    return DataFrameWriterSink(fn)


class _SparkSink(Sink):
    collects = True

    def __init__(self) -> None:
        self._spark: Any = None
        self._sink_id = ""
        self._done = 0

    def open(self, context: SinkContext) -> None:
        self._spark = context.spark or _active_session()
        if self._spark is None:
            raise SinkError(
                f"Sink {context.sink_id!r} writes through Spark, and there is no Spark session.",
                remedy="Run the flow on Spark (ps.run(..., master=...)), or start a SparkSession first.",
            )
        self._sink_id = context.sink_id
        if not context.resumed:
            self._done = 0

    def write(self, epoch: int, frame: pl.DataFrame) -> None:
        if epoch > self._done:
            if frame.height:
                self.effect(epoch, frame)
            self._done = epoch

    def effect(self, epoch: int, frame: pl.DataFrame) -> None:
        raise NotImplementedError


class DataFrameWriterSink(_SparkSink):
    """See :func:`dataframe_writer`."""

    def __init__(self, fn: Callable[[int, Any], object]) -> None:
        super().__init__()
        self._fn = fn

    def effect(self, epoch: int, frame: pl.DataFrame) -> None:
        call_user(self._fn, self._sink_id, epoch, to_spark(self._spark, frame))

    def describe(self) -> str:
        return f"Spark DataFrame to {getattr(self._fn, '__name__', type(self._fn).__name__)}"


class SparkTableSink(_SparkSink):
    """See :func:`spark_table`."""

    def __init__(self, name: str, epoch_column: str, format: str) -> None:
        super().__init__()
        self.name, self.epoch_column, self.format = name, epoch_column, format

    def open(self, context: SinkContext) -> None:
        super().open(context)
        if self.epoch_column in context.schema:
            raise SinkError(
                f"Sink {context.sink_id!r}: the rows have a column {self.epoch_column!r} of their own.",
                remedy="Choose another name: spark_table(..., epoch_column='_epoch').",
            )
        owner = f"{context.job_id}/{context.sink_id}"
        if not self._spark.catalog.tableExists(self.name):
            self._create(context.schema, owner)
            return
        found = {r["key"]: r["value"] for r in self._spark.sql(f"SHOW TBLPROPERTIES {self.name}").collect()}
        if found.get(JOB_PROPERTY) != owner:
            who = f"belongs to {found[JOB_PROPERTY]}" if JOB_PROPERTY in found else "was not made by Penstock"
            raise SinkError(
                f"The table {self.name} {who}.",
                remedy="Choose another name, drop the table, or resume that job with its checkpoint directory.",
                table=self.name,
            )

    def _create(self, schema: pl.Schema, owner: str) -> None:
        empty = self._with_epoch(0, pl.DataFrame(schema=schema))
        columns = ", ".join(
            f"`{f.name}` {f.dataType.simpleString()}" for f in to_spark(self._spark, empty).schema.fields
        )
        self._spark.sql(
            f"CREATE TABLE {self.name} ({columns}) USING {self.format} PARTITIONED BY (`{self.epoch_column}`) "
            f"TBLPROPERTIES ('{JOB_PROPERTY}' = '{owner}')"
        )

    def _with_epoch(self, epoch: int, frame: pl.DataFrame) -> pl.DataFrame:
        return frame.with_columns(pl.lit(epoch, dtype=pl.Int64).alias(self.epoch_column))

    def effect(self, epoch: int, frame: pl.DataFrame) -> None:
        # The partition is named in the statement: a "dynamic" overwrite is an option that insertInto passes over
        # without a word, and then the whole table goes.
        columns = ", ".join(f"`{name}`" for name in frame.columns)
        try:
            self._spark.sql(
                f"INSERT OVERWRITE TABLE {self.name} PARTITION (`{self.epoch_column}` = {epoch}) "
                f"SELECT {columns} FROM {{rows}}",
                rows=to_spark(self._spark, frame).coalesce(1),
            )
        except Exception as error:
            raise SinkError(
                f"Epoch {epoch} could not be written to the table {self.name}: {error}",
                remedy="Correct what it says and start the job again; the epoch is written once more.",
                table=self.name,
                epoch=epoch,
            ) from error

    def describe(self) -> str:
        return f"Spark table {self.name}"


def to_spark(spark: Any, frame: pl.DataFrame) -> Any:
    """A Spark DataFrame by Arrow. Types that Spark lacks become the next wider one; naive times become
    TIMESTAMP_NTZ."""
    casts = pl.Schema({name: _spark_type(dtype) or dtype for name, dtype in frame.schema.items()})
    return spark.createDataFrame(frame.cast(casts).to_arrow(compat_level=pl.CompatLevel.oldest()))


def _spark_type(dtype: pl.DataType) -> pl.DataType | None:
    """What to cast a column to before Spark sees it; None to leave it."""
    unsigned: dict[pl.DataType, pl.DataType] = {
        pl.UInt8(): pl.Int16(),
        pl.UInt16(): pl.Int32(),
        pl.UInt32(): pl.Int64(),
        pl.UInt64(): pl.Decimal(20, 0),
    }
    if dtype in unsigned:
        return unsigned[dtype]
    if isinstance(dtype, pl.Categorical | pl.Enum | pl.Time | pl.Null):
        return pl.String()
    if isinstance(dtype, pl.Datetime) and dtype.time_unit != "us":
        return pl.Datetime("us", dtype.time_zone)
    if isinstance(dtype, pl.Duration) and dtype.time_unit != "us":
        return pl.Duration("us")
    if isinstance(dtype, pl.List):
        inner = _spark_type(dtype.inner if isinstance(dtype.inner, pl.DataType) else dtype.inner())
        return None if inner is None else pl.List(inner)
    if isinstance(dtype, pl.Struct):
        fields = {f.name: f.dtype if isinstance(f.dtype, pl.DataType) else f.dtype() for f in dtype.fields}
        if any(_spark_type(t) is not None for t in fields.values()):
            return pl.Struct({n: _spark_type(t) or t for n, t in fields.items()})
    return None


def _active_session() -> Any:
    try:
        from pyspark.sql import SparkSession
    except ImportError:
        return None
    return SparkSession.getActiveSession()
