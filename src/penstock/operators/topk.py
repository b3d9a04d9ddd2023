"""The k greatest rows of each group.

Three cases, one operator:

* after a **window**: every row of a window comes in one epoch, so nothing is kept; each container sends only its own k
  best.
* after a **running aggregate** (a stream of updates): the latest row of every key is kept, because a value may fall
  and another come up.
* over **plain events** (``key_by(...).top_k``): the k best so far are kept for each key.

Ties are broken by the remaining columns in order, so that the result is one and the same at any parallelism.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl

from penstock.errors import FlowError
from penstock.frames import pick
from penstock.operators.base import (
    HASH,
    ORDER,
    Applied,
    Arrival,
    KeyedOperator,
    Prepared,
    Tick,
    canonical,
    visible,
)
from penstock.operators.rowstore import RowStore, stored_as
from penstock.operators.windows import WINDOW_END, mix_low
from penstock.state.hashing import hash_columns
from penstock.state.table import KeyedTable, TableSpec, objects
from penstock.state.values import VALUES

RANK = "rank"
_ALL = "__all"
FEW = 1024
"""So many rows are sorted rather than sifted first."""


class TopK(KeyedOperator):
    """``top_k(id, k, by=...)``; output has the input's columns and ``rank``, from 1."""

    def __init__(
        self,
        id: str,
        k: int,
        by: str,
        group: Sequence[str],
        schema: pl.Schema,
        *,
        identity: Sequence[str] | None,
        whole_groups: bool,
        descending: bool = True,
    ) -> None:
        if k < 1:
            raise FlowError(f"operator '{id}': k must be at least 1, not {k}.", operator=id)
        if not (schema[by].is_numeric() or schema[by].is_temporal() or schema[by] in (pl.String, pl.Boolean)):
            raise FlowError(
                f"operator '{id}': rows cannot be ranked by '{by}' of type {schema[by]}.",
                remedy="Rank by a column of numbers, times or text.",
                operator=id,
            )
        self.id = id
        self.k = k
        self.by = by
        self.group = tuple(group)
        self.key = self.group or (_ALL,)
        self.schema = schema
        self.descending = descending
        self.whole_groups = whole_groups
        self.due = WINDOW_END if whole_groups else None
        self.row_identity = tuple(identity) if identity is not None and not whole_groups else None
        kept = self.row_identity or ()
        self.others = RowStore(pl.Schema({c: t for c, t in schema.items() if c not in kept}))
        self.output = pl.Schema({**schema, RANK: pl.UInt32()})
        self.identity = None if whole_groups else (*self.group, RANK)
        # Every other column in order decides ties: the result does not depend on the order of arrival.
        self.sort_by = [by, *(c for c in schema if c != by)]
        self.sort_desc = [descending, *(False for c in schema if c != by)]

    def table(self) -> TableSpec | None:
        if self.whole_groups:
            return None
        if self.row_identity is None:
            return TableSpec(self._key_schema(), {"best": objects(VALUES)})
        key = pl.Schema({c: self.schema[c] for c in self.row_identity})
        return TableSpec(key, self.others.values)

    def _key_schema(self) -> pl.Schema:
        return pl.Schema({c: self.schema[c] for c in self.group} or {_ALL: pl.Int64()})

    def _best(self, frame: pl.DataFrame) -> pl.DataFrame:
        rows = self._candidates(frame).sort(self.sort_by, descending=self.sort_desc, nulls_last=True)
        if self.group:
            return rows.group_by(self.group, maintain_order=True).head(self.k).select(frame.columns)
        return rows.head(self.k)

    def _candidates(self, frame: pl.DataFrame) -> pl.DataFrame:
        """Without the rows that are surely not among the best: to sort all rows of a window takes longer than to make
        the window. A row is out when its group has k values, and all of them are better.
        """
        dtype = self.schema[self.by]
        plain = dtype.is_integer() or dtype.is_temporal() or (dtype.is_float() and not frame[self.by].is_nan().any())
        if frame.height <= FEW or not plain or any(self.schema[g].is_float() for g in self.group):
            return frame
        value = pl.col(self.by)
        best = value.drop_nulls()
        limit = best.top_k(self.k).min() if self.descending else best.bottom_k(self.k).max()
        found = [limit.alias("__limit"), value.count().alias("__known")]
        if self.group:
            limits = frame.group_by(self.group).agg(found)
            frame = frame.join(limits, on=self.group, how="left", nulls_equal=True)
        else:
            frame = frame.with_columns(found)
        good = value >= pl.col("__limit") if self.descending else value <= pl.col("__limit")
        return frame.filter(good.fill_null(False) | (pl.col("__known") < self.k)).drop("__limit", "__known")

    def prepare(self, frame: pl.DataFrame, from_source: bool, port: int = 0, clock_us: int = 0) -> Prepared:
        out = pick(frame, visible(frame.columns))
        if self.row_identity is None and out.height:
            out = self._best(out)
        return Prepared(out if self.group else out.with_columns(pl.lit(0, pl.Int64).alias(_ALL)))

    def apply(self, table: KeyedTable | None, arrivals: Sequence[Arrival], tick: Tick) -> Applied:
        frames = [a.frame for a in arrivals if a.frame.height]
        if not frames:
            return Applied(pl.DataFrame(schema=self.output))
        frame = pl.concat(frames)
        if self.whole_groups:
            best = self._best(pick(frame, self.schema))
        elif self.row_identity is None:
            assert table is not None
            best = self._best_so_far(table, frame)
        else:
            assert table is not None
            best = self._latest(table, frame)
        ranked = self._rank(best)
        hashes = hash_columns(ranked, self.group) if self.group else np.zeros(ranked.height, dtype=np.uint64)
        return Applied(canonical(ranked, hashes))

    def _rank(self, best: pl.DataFrame) -> pl.DataFrame:
        rows = best.sort(self.sort_by, descending=self.sort_desc, nulls_last=True)
        number = pl.int_range(1, pl.len() + 1, dtype=pl.UInt32)
        return rows.with_columns((number.over(self.group) if self.group else number).alias(RANK))

    def _best_so_far(self, table: KeyedTable, frame: pl.DataFrame) -> pl.DataFrame:
        names = self.schema.names()
        groups = frame.select(HASH, *self.key).unique(maintain_order=True)
        rows, _ = table.upsert(groups[HASH].to_numpy(), groups.select(self.key))
        column = table.column("best")
        kept = [r for row in rows.tolist() for r in (column[row] or ())]
        merged = self._best(pl.concat([pl.DataFrame(kept, self.schema, orient="row"), frame.select(names)]))
        parts = merged.partition_by(self.group, as_dict=True) if self.group else {(0,): merged}
        found = {_same(key): part for key, part in parts.items()}
        for row, key in zip(rows.tolist(), groups.select(self.key).iter_rows(), strict=True):
            column[row] = found[_same(key)].rows()
        return merged

    def _latest(self, table: KeyedTable, frame: pl.DataFrame) -> pl.DataFrame:
        assert self.row_identity is not None
        frame = frame.unique(list(self.row_identity), keep="last", maintain_order=True)
        keys = pick(frame, self.row_identity)
        hashes = mix_low(frame[HASH].to_numpy(), hash_columns(keys, self.row_identity))
        rows, _ = table.upsert(hashes, keys)
        self.others.write(table, rows, frame)
        live = table.live_rows()
        everything = table.keys(live).with_columns(self.others.read(table, live))
        everything = pick(everything, self.schema)
        if self.group:
            everything = everything.join(frame.select(self.group).unique(), on=self.group, how="semi", nulls_equal=True)
        return self._best(everything)

    def fingerprint(self) -> dict[str, Any]:
        return {
            "operator": "top_k",
            "group": list(self.group),
            "by": self.by,
            "k": self.k,
            "columns": {c: str(t) for c, t in self.schema.items()},
            "rows": 2,  # floats, unsigned numbers and times as numbers; once they were pickled
            **stored_as(table.values.values() if (table := self.table()) is not None else ()),
        }

    def describe(self) -> str:
        return f"top {self.k} by {self.by}" + (f" per {', '.join(self.group)}" if self.group else "")


def _same(key: tuple[Any, ...]) -> tuple[Any, ...]:
    """A group as a key of a dict: NaN is not equal to itself, and here it must be."""
    return tuple("\0nan" if value != value else value for value in key)


__all__ = ["ORDER", "RANK", "TopK"]
