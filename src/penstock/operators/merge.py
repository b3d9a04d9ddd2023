"""Several inputs as one, in an order that does not depend on when their rows came.

Two sources have no order of their own: which of them is read further in an epoch is chance. So rows are put in order by
how far event time had come *in their own input* (the greatest time up to the row, or its last promise), then by input,
then by their order in it. A row waits here until every other input has come further; then it goes on. What follows sees
one stream, whose order is a function of the data alone, and each row is judged by the watermark of its own input, as it
would be without.

The plan puts this stage before an operator that depends on order and has several inputs. Nobody writes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl

from penstock.frames import pick, rows_where, without
from penstock.operators.base import BY, HASH, NEVER, Applied, Arrival, KeyedOperator, Prepared, Tick
from penstock.operators.custom import MARK, with_marks, with_times
from penstock.operators.order import order_of, stacked_by_tags, tag, tag_columns, widened, with_tags
from penstock.operators.rowstore import RowStore
from penstock.operators.windows import mix_low
from penstock.state.table import KeyedTable, TableSpec, ValueType, numeric

_INPUT, _EPOCH, _NUMBER, _REACHED = "__input", "__epoch", "__number", "__reached"


class Merge(KeyedOperator):
    """Holds rows back until all inputs have come as far, and gives them on in order."""

    timed = True
    hands_on = True

    def __init__(
        self, id: str, follows: str, key: Sequence[str], on: str, schema: pl.Schema, inputs: Sequence[str], width: int
    ) -> None:
        """``follows``: the operator that it works for, which is told of dead letters. ``inputs``: the stages upstream,
        in order. ``width``: how many tags a row has at most.
        """
        self.id = id
        self.follows = follows
        self.key = tuple(key)
        self.on = on
        self.output = schema
        self.inputs = tuple(inputs)
        self.width = width
        self.store = RowStore(pl.Schema({c: t for c, t in schema.items() if c not in self.key}))
        whole = {name: pl.Int64() for name in (_INPUT, _EPOCH, _NUMBER)}
        self.table_key = pl.Schema({**{k: schema[k] for k in self.key}, **whole})

    @property
    def ordered(self) -> bool:
        return True

    def time_at(self, port: int) -> str | None:
        return self.on

    def table(self) -> TableSpec:
        own: dict[str, ValueType] = {name: numeric(np.int64, 0) for name in (_REACHED, *map(tag, range(self.width)))}
        return TableSpec(self.table_key, {**own, **self.store.values})

    def prepare(self, frame: pl.DataFrame, from_source: bool, port: int = 0, clock_us: int = 0) -> Prepared:
        prepared = with_times(self.follows, frame, self.on, 0, from_source)
        return replace(prepared, frame=without(prepared.frame, (BY,)))

    def apply(self, table: KeyedTable | None, arrivals: Sequence[Arrival], tick: Tick) -> Applied:
        assert table is not None
        out = []
        some = [a for a in arrivals if a.frame.height]
        if some:
            frame = stacked_by_tags(
                [
                    widened(with_marks([a], tick), self.width).with_columns(
                        pl.lit(self.inputs.index(a.origin), pl.Int64).alias(_INPUT),
                        pl.lit(tick.epoch, pl.Int64).alias(_EPOCH),
                    )
                    for a in some
                ]
            )
            ready = frame[MARK].to_numpy() < tick.watermark
            out.append(self._given(rows_where(frame, ready)))
            self._keep(table, rows_where(frame, ~ready))
        if tick.watermark != NEVER:
            live = table.live_rows()
            over = live[table.column(_REACHED)[live] < tick.watermark]
            if over.size:
                out.append(self._given(self._read(table, over)))
                table.delete(over)
        frames = [f for f in out if f.height]
        return Applied(stacked_by_tags(frames) if frames else pl.DataFrame(schema=self.output))

    def _given(self, frame: pl.DataFrame) -> pl.DataFrame:
        """In its order: how far time had come, the input, and the order in it."""
        ones = np.ones(frame.height, dtype=np.int64)
        before = [frame[MARK].to_numpy(), ones, frame[_INPUT].to_numpy(), frame[_EPOCH].to_numpy()]
        return with_tags(pick(frame, self.output), [*before, *tag_columns(frame)])

    def _keep(self, table: KeyedTable, frame: pl.DataFrame) -> None:
        if not frame.height:
            return
        epoch, number = frame[_EPOCH].to_numpy(), np.arange(frame.height, dtype=np.int64)
        keys = pick(frame, (*self.key, _INPUT, _EPOCH)).hstack([pl.Series(_NUMBER, number)])
        rows, _ = table.upsert(mix_low(frame[HASH].to_numpy(), frame[_INPUT].to_numpy(), epoch, number), keys)
        table.column(_REACHED)[rows] = frame[MARK].to_numpy()
        for name in order_of(frame):
            table.column(name)[rows] = frame[name].to_numpy()
        self.store.write(table, rows, frame)

    def _read(self, table: KeyedTable, rows: np.ndarray) -> pl.DataFrame:
        held = [pl.Series(name, table.column(name)[rows]) for name in map(tag, range(self.width))]
        mark = pl.Series(MARK, table.column(_REACHED)[rows])
        payload = pl.DataFrame(self.store.read(table, rows)).get_columns() if self.store.schema else []
        return table.keys(rows).hstack([*payload, *held, mark])

    def fingerprint(self) -> dict[str, Any]:
        return {
            "operator": "merge",
            "key": list(self.key),
            "on": self.on,
            "inputs": list(self.inputs),
            "columns": {c: str(t) for c, t in self.output.items()},
            "width": self.width,
        }

    def describe(self) -> str:
        return f"in order of {'time' if self.on == BY else self.on}, then by input"


__all__ = ["Merge"]
