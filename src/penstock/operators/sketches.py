"""Aggregates whose state is a Python object for each key: sets, lists and sketches.

A result may depend on the rows of a key and their source order, on nothing else: not on how the rows were cut into
epochs and partial results, nor on whether a state was stored and read again in between. Most sketches of the
`datasketches` library do not promise that, and were tried:

* **HLL** passes, with care. Its registers depend on the set of values alone, but the estimate it gives by default uses
  the order of updates. An estimate taken from the union of a sketch with itself does not; that is what we use.
* **KLL** and **REQ** draw random numbers: two runs differ. **t-digest** compresses when it is stored, so a restore
  shows. Quantiles are therefore counted in buckets whose bounds grow geometrically (as in DDSketch, Masson et al.,
  VLDB 2019): counts add, so the result depends on the multiset of values alone, and its relative error is bounded. The
  bucket is found from the float's exponent and mantissa, without logarithms, which differ between machines.
* **frequent_items** came through every restore we tried, but promises nothing: it purges by the median of a sample of
  its slots. For the same number of counters its bound is 3.5 times as wide as that of SpaceSaving (Metwally et al.,
  ICDT 2005), it holds text only, and it may name fewer than k. So heavy hitters are counted by SpaceSaving, in source
  order, with ties broken by value.
"""

from __future__ import annotations

import functools
import heapq
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import msgspec
import numpy as np
import polars as pl

from penstock.extras import need
from penstock.operators.accumulators import Kept, Objects, as_lists, one_nan
from penstock.operators.base import one_zero
from penstock.state.hashing import hash_columns

# -- values as plain Python objects that can be compared and hashed ----------------------------------------------------

_SIGN = np.int64(2**63 - 1)


def ordered_bits(values: np.ndarray) -> np.ndarray:
    """Floats as integers in the same order; NaN, of which there is one, above all."""
    bits = values.astype(np.float64, copy=False).view(np.int64)
    return np.where(bits < 0, bits ^ _SIGN, bits)


def from_ordered_bits(bits: np.ndarray) -> np.ndarray:
    return np.where(bits < 0, bits ^ _SIGN, bits).view(np.float64)


def on_values(function: Callable[[pl.Series], np.ndarray], dtype: pl.DataType) -> Callable[[pl.Series], pl.Series]:
    """Apply a numpy function to what is not null."""

    def run(series: pl.Series) -> pl.Series:
        absent = series.is_null()
        if not absent.any():
            return pl.Series(series.name, function(series), dtype=dtype)
        out = pl.Series(series.name, function(series.drop_nulls()), dtype=dtype)
        places = (~absent).cum_sum().cast(pl.Int64) - 1
        return out.gather(places.set(absent, None))

    return run


class Plain:
    """Values of a column as integers, text or bytes: floats by their ordered bits, with one NaN and one zero."""

    def __init__(self, keep: Kept) -> None:
        self.keep = keep
        self.floats = keep.stored == pl.Float64
        self.stored = pl.Int64() if self.floats else keep.stored

    def down(self, x: pl.Expr) -> pl.Expr:
        y = self.keep.down(x)
        if not self.floats:
            return y
        bits = on_values(lambda s: ordered_bits(s.to_numpy()), pl.Int64())
        return one_nan(y).map_batches(bits, return_dtype=pl.Int64())

    def up(self, values: Sequence[Any]) -> pl.Series:
        """Kept values as a series of the column's own type."""
        series = pl.Series("x", values, dtype=self.stored)
        if self.floats:
            series = pl.Series("x", from_ordered_bits(series.to_numpy()))
        return self.keep.restore(series)


# -- lists -------------------------------------------------------------------------------------------------------------


class Collect(Objects):
    """The values themselves, in order; at most the first ``limit``."""

    def __init__(self, name: str, x: pl.Expr, keep: Kept, limit: int | None) -> None:
        super().__init__(name, pl.List(keep.dtype), associative=False)
        self.keep = keep
        self.x = keep.down(x)
        self.limit = limit

    def partial(self) -> list[pl.Expr]:
        raise NotImplementedError("goes row by row")

    def single(self) -> list[pl.Expr]:
        return [self.x.alias(self.column)]

    def fresh(self) -> list[Any]:
        return []

    def extend(self, state: list[Any], values: list[Any]) -> list[Any]:
        state.extend(values if self.limit is None else values[: max(0, self.limit - len(state))])
        return state

    def join(self, state: list[Any], other: list[Any]) -> list[Any]:
        return self.extend(state, other)

    def layout(self) -> str:
        return f"limit {self.limit}"

    def results(self, states: list[Any]) -> pl.Series:
        flat = pl.Series([v for s in states for v in s or ()], dtype=self.keep.stored)
        return as_lists(self.keep.restore(flat), [len(s or ()) for s in states])


class Top(Objects):
    """The k greatest values, greatest first."""

    def __init__(self, name: str, x: pl.Expr, keep: Kept, k: int) -> None:
        super().__init__(name, pl.List(keep.dtype), associative=True)
        self.keep = keep
        self.k = k
        y = keep.down(x)
        self.inputs = [(one_zero(y.fill_nan(None)) if keep.stored == pl.Float64 else y).alias(self.column)]

    def partial(self) -> list[pl.Expr]:
        return [pl.col(self.column).drop_nulls().sort(descending=True).head(self.k)]

    def single(self) -> list[pl.Expr]:
        return [pl.col(self.column)]

    def fresh(self) -> list[Any]:
        return []

    def extend(self, state: list[Any], values: list[Any]) -> list[Any]:
        return sorted([*state, *values], reverse=True)[: self.k]

    def join(self, state: list[Any], other: list[Any]) -> list[Any]:
        return self.extend(state, other)

    def layout(self) -> str:
        return f"k {self.k}"

    def results(self, states: list[Any]) -> pl.Series:
        flat = pl.Series([v for s in states for v in s or ()], dtype=self.keep.stored)
        return as_lists(self.keep.restore(flat), [len(s or ()) for s in states])


# -- how many different values -----------------------------------------------------------------------------------------


class _SetCodec:
    def encode(self, value: set[Any]) -> bytes:
        return msgspec.msgpack.encode(value)

    def decode(self, data: bytes) -> set[Any]:
        return msgspec.msgpack.decode(data, type=set)


class Distinct(Objects):
    """The set of values."""

    codec = _SetCodec()

    def __init__(self, name: str, x: pl.Expr, keep: Kept) -> None:
        super().__init__(name, pl.Int64(), associative=True)
        self.inputs = [Plain(keep).down(x).alias(self.column)]

    def partial(self) -> list[pl.Expr]:
        return [pl.col(self.column).drop_nulls().unique()]

    def single(self) -> list[pl.Expr]:
        return [pl.col(self.column)]

    def fresh(self) -> set[Any]:
        return set()

    def extend(self, state: set[Any], values: list[Any]) -> set[Any]:
        state.update(values)
        return state

    def join(self, state: set[Any], other: set[Any]) -> set[Any]:
        state |= other
        return state

    def results(self, states: list[Any]) -> pl.Series:
        return pl.Series([len(s or ()) for s in states], dtype=pl.Int64)


@functools.cache
def _datasketches() -> Any:
    return need("datasketches", "approx_distinct")


class _HllCodec:
    def encode(self, value: Any) -> bytes:
        return bytes(value.serialize_compact())

    def decode(self, data: bytes) -> Any:
        return _datasketches().hll_sketch.deserialize(data)


class ApproxDistinct(Objects):
    """A HyperLogLog sketch of 2**lg_k registers, over our own stable hash of the values."""

    codec = _HllCodec()

    def __init__(self, name: str, x: pl.Expr, error: float) -> None:
        super().__init__(name, pl.Int64(), associative=True)
        _datasketches()  # a flow that cannot run is refused while it is written
        # The standard error of an estimate from m registers is 1.04 / sqrt(m).
        self.lg_k = min(21, max(4, math.ceil(math.log2((1.04 / error) ** 2))))

        def hashed(series: pl.Series) -> np.ndarray:
            return hash_columns(series.to_frame("x"), ["x"]).view(np.int64)

        self.inputs = [x.map_batches(on_values(hashed, pl.Int64()), return_dtype=pl.Int64()).alias(self.column)]

    def partial(self) -> list[pl.Expr]:
        return [pl.col(self.column).drop_nulls().unique()]

    def encode(self, frame: pl.DataFrame) -> pl.DataFrame:
        groups = frame[self.column].to_list()
        sketched = [self.codec.encode(self.extend(self.fresh(), values)) for values in groups if values]
        flat = pl.Series(sketched, dtype=pl.Binary())
        return frame.with_columns(as_lists(flat, [1 if values else 0 for values in groups]).alias(self.column))

    def single(self) -> list[pl.Expr]:
        return [pl.col(self.column)]

    def fresh(self) -> Any:
        return _datasketches().hll_sketch(self.lg_k, _datasketches().tgt_hll_type.HLL_8)

    def extend(self, state: Any, values: list[int]) -> Any:
        update = state.update
        for value in values:
            update(value)
        return state

    def absorb(self, state: Any, items: list[bytes]) -> Any:
        return self._union([state, *map(self.codec.decode, items)])

    def join(self, state: Any, other: Any) -> Any:
        return self._union([state, other])

    def _union(self, sketches: Sequence[Any]) -> Any:
        union = _datasketches().hll_union(self.lg_k)
        for sketch in sketches:
            union.update(sketch)
        return union.get_result(_datasketches().tgt_hll_type.HLL_8)

    def copy(self, state: Any) -> Any:
        return self.codec.decode(self.codec.encode(state))

    def layout(self) -> str:
        return f"2**{self.lg_k}"

    def results(self, states: list[Any]) -> pl.Series:
        return pl.Series([self._estimate(s) for s in states], dtype=pl.Int64)

    def _estimate(self, sketch: Any) -> int:
        if sketch is None:
            return 0
        union = _datasketches().hll_union(self.lg_k)
        union.update(sketch)
        union.update(sketch)  # changes nothing but the estimator: from now on by registers alone
        return round(union.get_estimate())


# -- quantiles ---------------------------------------------------------------------------------------------------------

_MIDDLE = 2**40
"""Bucket of values about 1: high enough that all finite values have positive buckets."""
_INFINITY = 2**50


class LogBuckets:
    """Buckets of positive and negative numbers such that any value is within ``error`` of its bucket's middle.

    For x = 2**e * (1 + s) with 0 <= s < 1, e + s grows with x, never more slowly than ln x. So buckets of equal width
    ln((1 + error) / (1 - error)) in e + s have bounds whose ratio is at most (1 + error) / (1 - error).
    """

    def __init__(self, error: float) -> None:
        tight = error * (1 - 1e-6)  # room for rounding in e + s
        self.per_unit = 1 / math.log((1 + tight) / (1 - tight))

    def of(self, values: np.ndarray) -> np.ndarray:
        size = np.abs(values)
        finite = np.isfinite(size)
        mantissa, exponent = np.frexp(np.where(finite, size, 1.0))
        place = np.floor(((exponent - 1) + (2 * mantissa - 1)) * self.per_unit).astype(np.int64) + _MIDDLE
        place = np.where(finite, place, _INFINITY)
        return np.where(size == 0, 0, np.where(values < 0, -place, place))

    def middle(self, bucket: int) -> float:
        """A value within ``error`` of all in the bucket."""
        if bucket == 0:
            return 0.0
        if abs(bucket) == _INFINITY:
            return math.copysign(math.inf, bucket)
        low, high = self._bound(abs(bucket)), self._bound(abs(bucket) + 1)
        return math.copysign(low if high == math.inf else low * (2 * high / (low + high)), bucket)

    def _bound(self, bucket: int) -> float:
        place = (bucket - _MIDDLE) / self.per_unit
        exponent = math.floor(place)
        try:
            return math.ldexp(1 + (place - exponent), exponent)
        except OverflowError:
            return math.inf


class _CountsCodec:
    def encode(self, value: dict[int, int]) -> bytes:
        return msgspec.msgpack.encode(value)

    def decode(self, data: bytes) -> dict[int, int]:
        return msgspec.msgpack.decode(data, type=dict[int, int])


class Quantiles(Objects):
    """Counts of buckets (``error`` > 0) or of the values themselves (``error`` = 0)."""

    codec = _CountsCodec()

    def __init__(self, name: str, x: pl.Expr, keep: Kept, q: Sequence[float], several: bool, error: float) -> None:
        one: pl.DataType = pl.Float64() if error else keep.dtype
        super().__init__(name, pl.List(one) if several else one, associative=True)
        self.q = tuple(q)
        self.several = several
        self.plain = Plain(keep)
        if keep.stored == pl.Float64:
            x = x.fill_nan(None)
        if error:
            self.buckets: LogBuckets | None = LogBuckets(error)
            of = self.buckets.of
            placed = on_values(lambda s: of(s.to_numpy()), pl.Int64())
            self.inputs = [x.cast(pl.Float64).map_batches(placed, return_dtype=pl.Int64()).alias(self.column)]
        else:
            self.buckets = None
            self.inputs = [self.plain.down(x).alias(self.column)]

    def partial(self) -> list[pl.Expr]:
        return [pl.col(self.column).drop_nulls()]

    def encode(self, frame: pl.DataFrame) -> pl.DataFrame:
        """Lists of places become lists of (place, count). By hand: polars counts the values of groups one by one."""
        lists = frame[self.column]
        groups = np.repeat(np.arange(frame.height), lists.list.len().to_numpy())
        places = lists.explode(empty_as_null=False, keep_nulls=False).to_numpy()
        order = np.lexsort((places, groups))
        groups, places = groups[order], places[order]
        change = np.ones(len(places), dtype=np.bool_)
        change[1:] = (places[1:] != places[:-1]) | (groups[1:] != groups[:-1])
        starts = np.flatnonzero(change)
        counts = np.diff(np.r_[starts, len(places)])
        flat = pl.DataFrame([pl.Series(self.column, places[starts]), pl.Series("count", counts, dtype=pl.Int64)])
        lengths = np.bincount(groups[starts], minlength=frame.height)
        return frame.with_columns(as_lists(flat.to_struct("x"), lengths).alias(self.column))

    def single(self) -> list[pl.Expr]:
        return [pl.col(self.column)]

    def slices(self, values: pl.Series) -> Callable[[int, int], Any]:
        if values.dtype != pl.Struct:
            return super().slices(values)
        fields = values.struct.unnest()
        places, counts = fields[self.column].to_list(), fields["count"].to_list()
        return lambda begin, end: zip(places[begin:end], counts[begin:end], strict=True)

    def fresh(self) -> dict[int, int]:
        return {}

    def extend(self, state: dict[int, int], values: list[int]) -> dict[int, int]:
        for value in values:
            state[value] = state.get(value, 0) + 1
        return state

    def absorb(self, state: dict[int, int], items: Any) -> dict[int, int]:
        for value, count in items:
            state[value] = state.get(value, 0) + count
        return state

    def join(self, state: dict[int, int], other: dict[int, int]) -> dict[int, int]:
        return self.absorb(state, other.items())

    def layout(self) -> str:
        return f"per unit {self.buckets.per_unit!r}" if self.buckets else "exact"

    def results(self, states: list[Any]) -> pl.Series:
        found = [self._of(s) if s else None for s in states]
        flat = [v for values in found if values is not None for v in values]
        if self.buckets:
            middles = {place: self.buckets.middle(place) for place in set(flat)}
            values = pl.Series([middles[place] for place in flat], dtype=pl.Float64)
        else:
            values = self.plain.up(flat)
        if self.several:
            values = as_lists(values, [len(f) for f in found if f is not None])
        there = np.array([f is not None for f in found], dtype=np.bool_)
        return values.gather(pl.Series(np.cumsum(there) - 1).set(pl.Series(~there), None))

    def _of(self, counts: dict[int, int]) -> list[int]:
        """The value at place floor(q * (n - 1)) of all n in order, for each q."""
        places = sorted(counts)
        ends = list(accumulate(map(counts.__getitem__, places)))
        return [places[bisect_right(ends, math.floor(q * (ends[-1] - 1)))] for q in self.q]


# -- heavy hitters -----------------------------------------------------------------------------------------------------


class Summary:
    """SpaceSaving: at most ``capacity`` values with a count that is never too low, and by how much it may be too high.

    The value with the least count makes room (of several, the least value). The heap holds each value once with a
    count that may have grown since; it follows from the counts, so a stored and restored summary goes on the same way.
    """

    __slots__ = ("_heap", "counts")

    def __init__(self, counts: dict[Any, tuple[int, int]] | None = None) -> None:
        self.counts: dict[Any, tuple[int, int]] = counts or {}
        self._heap: list[tuple[int, Any]] | None = None

    def copy(self) -> Summary:
        return Summary(dict(self.counts))

    def offer(self, value: Any, capacity: int) -> None:
        known = self.counts.get(value)
        if known is not None:
            self.counts[value] = (known[0] + 1, known[1])
        elif len(self.counts) < capacity:
            self.counts[value] = (1, 0)
            if self._heap is not None:
                heapq.heappush(self._heap, (1, value))
        else:
            least = self._least()
            assert self._heap is not None
            del self.counts[self._heap[0][1]]
            self.counts[value] = (least + 1, least)
            heapq.heapreplace(self._heap, (least + 1, value))

    def _least(self) -> int:
        """Bring the value that must go to the top of the heap; its count."""
        if self._heap is None:
            self._heap = [(count, value) for value, (count, _) in self.counts.items()]
            heapq.heapify(self._heap)
        while True:
            count, value = self._heap[0]
            now = self.counts[value][0]
            if now == count:
                return count
            heapq.heapreplace(self._heap, (now, value))

    def join(self, other: Summary, capacity: int) -> None:
        """Add a later summary. What one of them has forgotten may have been there as often as its least count."""
        here = min((c for c, _ in self.counts.values()), default=0) if len(self.counts) >= capacity else 0
        there = min((c for c, _ in other.counts.values()), default=0) if len(other.counts) >= capacity else 0
        merged = {}
        for value in self.counts.keys() | other.counts.keys():
            a, b = self.counts.get(value, (here, here)), other.counts.get(value, (there, there))
            merged[value] = (a[0] + b[0], a[1] + b[1])
        self.counts = merged
        self.counts = {value: (-count, error) for count, value, error in self.ranked()[:capacity]}
        self._heap = None

    def ranked(self) -> list[tuple[int, Any, int]]:
        """(-count, value, error), most frequent first, ties by value."""
        return sorted((-count, value, error) for value, (count, error) in self.counts.items())


class _SummaryCodec:
    def encode(self, value: Summary) -> bytes:
        return msgspec.msgpack.encode([[v, c, e] for v, (c, e) in value.counts.items()])

    def decode(self, data: bytes) -> Summary:
        return Summary({v: (c, e) for v, c, e in msgspec.msgpack.decode(data)})


class HeavyHitters(Objects):
    """The k most frequent values, of ``capacity`` that are counted."""

    codec = _SummaryCodec()

    def __init__(self, name: str, x: pl.Expr, keep: Kept, k: int, capacity: int) -> None:
        self.item = pl.Struct({"value": keep.dtype, "count": pl.Int64(), "error": pl.Int64()})
        super().__init__(name, pl.List(self.item), associative=False)
        self.plain = Plain(keep)
        self.k = k
        self.capacity = capacity
        self.inputs = [self.plain.down(x).alias(self.column)]

    def partial(self) -> list[pl.Expr]:
        raise NotImplementedError("goes row by row")

    def single(self) -> list[pl.Expr]:
        return [pl.col(self.column)]

    def fresh(self) -> Summary:
        return Summary()

    def extend(self, state: Summary, values: list[Any]) -> Summary:
        for value in values:
            state.offer(value, self.capacity)
        return state

    def join(self, state: Summary, other: Summary) -> Summary:
        state.join(other, self.capacity)
        return state

    def layout(self) -> str:
        return f"capacity {self.capacity}"

    def results(self, states: list[Any]) -> pl.Series:
        best = [s.ranked()[: self.k] if s is not None else [] for s in states]
        flat = [item for items in best for item in items]
        rows = pl.DataFrame(
            [
                self.plain.up([v for _, v, _ in flat]).alias("value"),
                pl.Series("count", [-c for c, _, _ in flat], dtype=pl.Int64),
                pl.Series("error", [e for _, _, e in flat], dtype=pl.Int64),
            ]
        )
        return as_lists(rows.to_struct("x"), [len(items) for items in best])


__all__ = ["ApproxDistinct", "Collect", "Distinct", "HeavyHitters", "LogBuckets", "Quantiles", "Summary", "Top"]
