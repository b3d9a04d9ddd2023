"""Custom operators: what is refused, what is said when a user's code fails, and what is set aside."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from typing import Annotated, Any
from zoneinfo import ZoneInfo

import cloudpickle
import msgspec
import numpy as np
import polars as pl
import pytest

import penstock as ps
from penstock import testing
from penstock.errors import FlowError, UserCodeError
from penstock.operators.base import FOREVER, HASH, ORDER, Applied, Arrival, Tick
from penstock.operators.batch import Batch, Batched
from penstock.operators.custom import Custom, Outlet, event_type, group_by_key
from penstock.operators.order import tag
from penstock.operators.statelayout import number_fields
from penstock.state.hashing import hash_columns
from penstock.state.slicemap import SliceMap
from penstock.state.table import KeyedTable

T0 = datetime(2026, 1, 1)
FRAME = pl.DataFrame(
    {"k": ["a", "b", "a"], "at": [T0, T0 + timedelta(seconds=1), T0 + timedelta(seconds=2)], "n": [1, 2, 3]}
)
OUT = {"k": str, "n": int}


def seconds(n: float) -> datetime:
    return T0 + timedelta(seconds=n)


def us(at: datetime) -> int:
    return (at - datetime(1970, 1, 1)) // timedelta(microseconds=1)


def flow_of(operator: Any, frame: pl.DataFrame = FRAME, schema: Any = OUT, **how: Any) -> ps.Flow:
    flow = ps.Flow("custom")
    flow.source("rows", testing.rows(frame)).key_by("k").process("op", operator, schema=schema, **how).sink(
        "out", ps.memory()
    )
    return flow


def apply(
    custom: Custom | Batched, frame: pl.DataFrame, table: KeyedTable | None = None, watermark: int | None = None
) -> Applied:
    prepared = custom.prepare(frame, True)
    rows = prepared.frame.with_columns(pl.Series(HASH, hash_columns(prepared.frame, custom.key), dtype=pl.UInt64))
    layout = custom.table()
    table = table or (KeyedTable(layout) if layout else None)
    tick = Tick(1, watermark=watermark) if watermark is not None else Tick(1)
    return custom.apply(table, [Arrival(rows, "source", 0, True)], tick)


# -- refused when the flow is built -----------------------------------------------------------------------------------


class NoEvent(ps.Operator):
    pass


class TooFew(ps.Operator):
    def on_event(self, key: Any) -> None:
        pass


class Starred(ps.Operator):
    def on_event(self, key: Any, event: Any, *states: Any) -> None:
        pass


class Unknown(ps.Operator):
    def on_event(self, key: Any, event: Any, total: int, emit: Any) -> None:
        pass


class NoSize(ps.Operator):
    def on_event(self, key: Any, event: Any, last: ps.CountWindow[int], emit: Any) -> None:
        pass


class NoSpan(ps.Operator):
    def on_event(self, key: Any, event: Any, last: Annotated[ps.TimeWindow[int], ps.keep(3)], emit: Any) -> None:
        pass


class KeptMap(ps.Operator):
    def on_event(self, key: Any, event: Any, m: Annotated[ps.Map[str, int], ps.keep(3)], emit: Any) -> None:
        pass


class Expiring(ps.Operator):
    def on_event(
        self, key: str, event: ps.Event, seen: Annotated[ps.Value[int], ps.expires("5s")], emit: ps.Emit
    ) -> None:
        emit(key, seen.get(-1))
        seen.set(event.n)


class Unstorable(ps.Operator):
    def on_event(self, key: Any, event: Any, m: ps.Map[str, object()], emit: Any) -> None:  # type: ignore
        pass


class Timed(ps.Operator):
    def on_event(self, key: Any, event: Any, timers: ps.Timers, emit: Any) -> None:
        timers.set(event.at + timedelta(seconds=event.n - 2), f"t{event.n}")

    def on_timer(self, key: Any, at: datetime, name: str, emit: Any) -> None:
        emit(key, int(name[1:]))


class NoTimer(ps.Operator):
    def on_event(self, key: Any, event: Any, timers: ps.Timers) -> None:
        pass


class Disagreeing(Timed):
    def on_event(self, key: Any, event: Any, x: ps.Value[int]) -> None:
        pass

    def on_timer(self, key: Any, at: datetime, x: ps.Value[str]) -> None:
        pass


class Arguments(ps.Operator):
    def __init__(self, n: int) -> None:
        self.n = n


class NoBatch(ps.BatchOperator):
    pass


class Sums(ps.BatchOperator):
    total = ps.column(int)

    def on_batch(self, batch: ps.Batch, state: ps.State) -> pl.DataFrame:
        state.total += np.add.reduceat(batch["n"], batch.starts)
        return batch.keys.with_columns(n=state.total)


class NewColumn(Sums):
    new = ps.column(int)


class BatchArguments(ps.BatchOperator):
    def __init__(self, needed: int) -> None:
        self.needed = needed

    def on_batch(self, batch: ps.Batch, state: ps.State) -> None:
        return None


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no on_event": (NoEvent, {}, "NoEvent does not define on_event"),
    "too few parameters": (TooFew, {}, "on_event must take at least key and event"),
    "starred": (Starred, {}, "no * or ** parameters"),
    "unknown parameter": (Unknown, {}, "parameter 'total' of on_event is neither 'emit' nor a state"),
    "count window without a size": (NoSize, {}, "state 'last' does not say how many"),
    "time window without a span": (NoSpan, {}, "state 'last' does not say how long"),
    "keep of a map": (KeptMap, {}, "ps.keep is for windows, not for a Map"),
    "expiry without time": (Expiring, {}, "state 'seen' expires, but the operator has no event time"),
    "type that cannot be stored": (Unstorable, {}, "cannot be stored"),
    "timers without time": (Timed, {}, "parameter 'timers' of on_event needs event time"),
    "timers without on_timer": (NoTimer, {"on": "at"}, "NoTimer does not define on_timer"),
    "states that disagree": (Disagreeing, {"on": "at"}, "state 'x' is declared differently"),
    "a class with arguments": (Arguments, {}, "Arguments cannot be made without arguments"),
    "not an operator": (42, {}, "int is not a ps.Operator"),
    "no such column": (Expiring, {"on": "when"}, "there is no column 'when'"),
    "not a time": (Expiring, {"on": "n"}, "column 'n' has type Int64, not a time"),
    "lateness without time": (NoEvent, {"lateness": "1s"}, "lateness and hold mean something only with event time"),
    "negative lateness": (Expiring, {"on": "at", "lateness": -1}, "lateness cannot be negative"),
    "no on_batch": (NoBatch, {}, "NoBatch does not define on_batch"),
    "lateness without time for batches": (Sums, {"lateness": "1s"}, "mean something only with event time"),
    "a batch class with arguments": (BatchArguments, {}, "BatchArguments cannot be made without arguments"),
    "batch without key": (Sums, {"schema": {"n": int}}, "must have the key column 'k'"),
    "batch state called new": (NewColumn, {}, "cannot be called 'new'"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_bad_operator_is_refused_by_name_when_the_flow_is_built(what: str) -> None:
    operator, how, says = REFUSED[what]
    with pytest.raises(FlowError) as error:
        flow_of(operator, **how)
    assert says in error.value.message
    assert "operator 'op'" in error.value.message and error.value.remedy


def test_bad_declarations_are_refused_where_they_are_written() -> None:
    for wrong in (
        lambda: ps.keep(0),
        lambda: ps.keep("0s"),
        lambda: ps.expires(0),
        lambda: ps.expires("soon"),
        lambda: ps.column(int, "x"),
        lambda: ps.column(str, "x"),
    ):
        with pytest.raises(FlowError):
            wrong()


# -- events and emit --------------------------------------------------------------------------------------------------


def test_an_event_has_its_columns_as_attributes_and_by_name() -> None:
    event = event_type(["word", "a b", "class", "a-b"])("w", 1, 2, 3)
    assert isinstance(event, ps.Event)
    assert event.word == "w" and event["word"] == "w"
    assert (event["a b"], event["class"], event["a-b"]) == (1, 2, 3)
    assert event._2 == 2
    with pytest.raises(AttributeError):
        event.word = "x"
    with pytest.raises(KeyError):
        event["nothing"]


@pytest.mark.parametrize("names", [["k", "n"], ["k", "the n"], ["append_1", "append_0"]])
def test_emit_takes_columns_by_name_or_in_order_and_refuses_others(names: list[str]) -> None:
    outlet = Outlet(pl.Schema({names[0]: pl.String(), names[1]: pl.Int64()}))
    outlet.emit("x", 1)
    outlet.emit(**{names[1]: 2, names[0]: "y"})
    outlet.emit("z", **{names[1]: 3})
    for wrong in (lambda: outlet.emit("x"), lambda: outlet.emit("x", 1, **{names[1]: 2}), lambda: outlet.emit(q=1)):
        with pytest.raises(TypeError, match=r"emit\(\)"):
            wrong()
    outlet.close_key()
    frame = outlet.frame("op", 1, np.array([7], dtype=np.uint64))
    assert frame.rows() == [("x", 1, 7), ("y", 2, 7), ("z", 3, 7)]


class Wrong(ps.Operator):
    def __init__(self, what: Any) -> None:
        self.what = what

    def on_event(self, key: str, event: ps.Event, emit: ps.Emit) -> None:
        emit(key, self.what if event.n == 3 else event.n)


@pytest.mark.parametrize("what", ["text", 1.5, 2**80])
def test_a_value_that_does_not_fit_its_column_is_named(what: Any) -> None:
    with pytest.raises(UserCodeError, match="column 'n' of type Int64") as error:
        testing.collect(flow_of(Wrong(what)))
    assert repr(what) in error.value.message and "operator 'op'" in error.value.message


class Raising(ps.Operator):
    def on_event(self, key: str, event: ps.Event, seen: ps.Value[int], emit: ps.Emit) -> None:
        seen.set(1 // (3 - event.n))


def test_code_that_raises_stops_the_job_and_names_the_record() -> None:
    with pytest.raises(UserCodeError, match="operator 'op' raised ZeroDivisionError") as error:
        testing.collect(flow_of(Raising))
    assert "'k': 'a'" in error.value.message and "'n': 3" in error.value.message


class RaisingTimer(Timed):
    def on_timer(self, key: Any, at: datetime) -> None:
        raise ValueError("no")


def test_a_timer_that_raises_is_named() -> None:
    with pytest.raises(UserCodeError, match="ValueError: no") as error:
        testing.collect(flow_of(RaisingTimer, on="at"))
    assert "'timer': '2026-01-01T00:00:01'" in error.value.message


class SetsNone(ps.Operator):
    def on_event(self, key: str, event: ps.Event, seen: ps.Value[int], emit: ps.Emit) -> None:
        seen.set(None)  # type: ignore[arg-type]


def test_a_value_cannot_be_none() -> None:
    with pytest.raises(UserCodeError, match="use clear"):
        testing.collect(flow_of(SetsNone))


# -- values of numbers ------------------------------------------------------------------------------------------------


@dataclass
class Numbers:
    n: int
    x: float = 1.5


class Tagged(msgspec.Struct, kw_only=True):
    n: int


@dataclass
class Checked:
    n: int

    def __post_init__(self) -> None:
        pass


def test_which_types_become_columns() -> None:
    assert number_fields(Numbers) == {"n": (int, 0), "x": (float, 1.5)}
    assert number_fields(float) == {"": (float, 0.0)}
    for other in (int, str, Tagged, Checked, list[int], Any, dict):
        assert number_fields(other) is None


class Holder(ps.Operator):
    def __init__(self, made: Any) -> None:
        self.made = made

    def on_event(self, key: str, event: ps.Event, held: ps.Value[Numbers], emit: ps.Emit) -> None:
        held.set(self.made)


@pytest.mark.parametrize(
    "made, says",
    [
        (Numbers(2**63), "field 'n' of state 'held' was set to 9223372036854775808, which does not fit in 64 bits"),
        (Numbers(1.5), "field 'n' of state 'held' is declared as int and was set to 1.5"),  # type: ignore[arg-type]
        (Numbers(1, None), "field 'x' of state 'held' is declared as float and was set to None"),  # type: ignore
        ((1, 2), "state 'held' is declared as Numbers and was set to a tuple"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(made: Any, says: str) -> None:
    with pytest.raises(UserCodeError) as error:
        testing.collect(flow_of(Holder(made)))
    assert says in error.value.message


@pytest.mark.parametrize("value", ["text", True, np.int64(1), 1.0])
def test_a_value_of_another_type_is_refused_at_once_not_after_a_restore(value: Any) -> None:
    class Other(ps.Operator):
        def on_event(self, key: str, event: Any, seen: ps.Value[int], emit: Any) -> None:
            seen.set(value)

    with pytest.raises(UserCodeError, match="state 'seen' is declared as int and was set to a"):
        testing.collect(flow_of(Other))


def test_a_field_that_a_checkpoint_does_not_have_gets_its_default() -> None:
    custom = Custom("op", ["k"], Holder(Numbers(7, 2.0)), FRAME.schema, pl.Schema({"k": pl.String()}))
    layout = custom.table()
    assert layout is not None
    table, fresh = KeyedTable(layout), KeyedTable(layout)
    apply(custom, FRAME, table)
    table.seal(1)
    fresh.load(table.export([0], SliceMap(1)).drop("__s.held.x"))
    held = custom.made()[1]["held"].load(fresh, fresh.live_rows())
    assert held == [Numbers(7, 1.5), Numbers(7, 1.5)]


def test_large_integers_alone_are_kept() -> None:
    class Big(ps.Operator):
        def on_event(self, key: str, event: Any, seen: ps.Value[int], emit: Any) -> None:
            emit(key, seen.get(0) // 2**63)
            seen.set(2**64 - 1)

    out = testing.collect(flow_of(Big), epoch_rows=1)
    assert sorted(out.rows()) == [("a", 0), ("a", 1), ("b", 0)]


# -- time -------------------------------------------------------------------------------------------------------------


def test_a_timer_in_the_past_is_a_dead_letter() -> None:
    custom = Custom("op", ["k"], Timed(), FRAME.schema, pl.Schema({"k": pl.String(), "n": pl.Int64()}), on="at")
    applied = apply(custom, FRAME, watermark=FOREVER)
    assert sorted(applied.frame.drop(ORDER).rows()) == [("a", 3), ("b", 2)], "one for the event's own time fires"
    assert sorted((operator, raw) for operator, _, _, raw in applied.dead) == [
        ("op", "{'key': 'a', 'at': '2025-12-31T23:59:59', 'name': 't1'}"),
    ]
    assert all("which the watermark had passed" in reason for _, _, reason, _ in applied.dead)


def test_a_row_without_a_time_is_a_dead_letter() -> None:
    custom = Custom("op", ["k"], Expiring(), FRAME.schema, pl.Schema({"k": pl.String(), "n": pl.Int64()}), on="at")
    prepared = custom.prepare(FRAME.with_columns(at=pl.Series([None, T0, None], dtype=pl.Datetime("us"))), True)
    assert prepared.frame.height == 1 and len(prepared.dead) == 2
    assert prepared.dead[0][0] == "op" and "'k': 'a'" in prepared.dead[0][3]
    none = custom.prepare(FRAME.with_columns(at=pl.lit(None, pl.Datetime("us"))), True)
    assert none.frame.height == 0 and none.time_max is None and "__mark" in none.frame.columns


def test_expiry_follows_the_watermark_at_the_row_not_the_epoch() -> None:
    """Five seconds after the last touch the state is gone for the next event; what others do in between counts."""
    frame = pl.DataFrame({"k": ["a", "b", "a", "a"], "at": [seconds(0), seconds(9), seconds(2), seconds(13)]})
    frame = frame.with_columns(n=pl.Series([1, 2, 3, 4]))
    for epochs in ([4], [1, 1, 1, 1], [2, 2]):
        flow = flow_of(Expiring, frame, on="at")
        out = testing.collect(flow, sources={"rows": testing.rows(frame, epochs=epochs)})
        assert out.filter(pl.col("k") == "a")["n"].to_list() == [-1, -1, 3]


class Line(ps.Operator):
    def on_event(
        self, key: str, event: ps.Event, line: Annotated[ps.Queue[int], ps.expires("5s")], emit: ps.Emit
    ) -> None:
        emit(key, len(line))
        if event.n:
            line.push(event.n)
        elif len(line):
            line.pop()


@pytest.mark.parametrize(
    "operator, rows, expected",
    [
        # Touched at 10 and, by a late event, at 4: until 15.
        (Expiring, [("a", 10, 1), ("a", 4, 3), ("b", 22, 1), ("a", 22, 1)], [-1, 1, 3]),
        # Emptied in between: what was touched at 10 is no more, and the new one stays until 9.
        (Line, [("a", 10, 1), ("a", 10, 0), ("a", 4, 1), ("b", 22, 1), ("a", 22, 1)], [0, 1, 0, 0]),
    ],
)
def test_what_a_late_event_touches_does_not_expire_sooner(operator: Any, rows: list[Any], expected: list[int]) -> None:
    frame = pl.DataFrame([(k, seconds(at), n) for k, at, n in rows], schema=["k", "at", "n"], orient="row")
    for epochs in ([len(rows)], [1] * len(rows)):
        source = testing.rows(frame, epochs=epochs)
        out = testing.collect(flow_of(operator, frame, on="at", lateness="10s"), sources={"rows": source})
        assert out.filter(pl.col("k") == "a")["n"].to_list() == expected


class Clocked(ps.Operator):
    def on_event(self, key: str, event: ps.Event, time: ps.Time, timers: ps.Timers, emit: ps.Emit) -> None:
        assert time.clock.tzinfo is not None
        timers.set(event.at + timedelta(days=1))
        emit(key, str(time.watermark))

    def on_timer(self, key: str, at: datetime, time: ps.Time, emit: ps.Emit) -> None:
        assert time.watermark == at
        emit(key, str(at))


@pytest.mark.parametrize(
    "times, expected",
    [
        (pl.Series([date(2026, 1, 1), date(2026, 1, 3)]), ["2026-01-01 00:00:00", "2026-01-02 00:00:00"]),
        (pl.Series([T0, seconds(200_000)], dtype=pl.Datetime("ns")), ["2026-01-01 00:00:00", "2026-01-02 00:00:00"]),
        (
            pl.Series([T0, seconds(200_000)], dtype=pl.Datetime("ms")).dt.replace_time_zone("Europe/Berlin"),
            ["2026-01-01 00:00:00+01:00", "2026-01-02 00:00:00+01:00"],
        ),
    ],
)
def test_times_are_as_the_column_has_them(times: pl.Series, expected: list[str]) -> None:
    frame = pl.DataFrame({"k": ["a", "a"], "at": times})
    out = testing.collect(flow_of(Clocked, frame, {"k": str, "saw": str}, on="at"))
    assert out["saw"].to_list()[:2] == expected


def test_rows_of_a_keyed_stage_come_in_the_order_of_their_causes_each_with_its_watermark() -> None:
    schema = pl.Schema({"k": pl.String(), "saw": pl.String()})
    custom = Custom("op", ["k"], Clocked(), pl.Schema({"k": pl.String(), "at": pl.Datetime("us")}), schema, on="at")
    given = pl.DataFrame({"k": ["a", "a"], "at": [seconds(200_000), T0], tag(0): [1, 2], tag(1): [0, 0]})
    prepared = custom.prepare(given, True).frame
    rows = prepared.with_columns(pl.Series(HASH, hash_columns(prepared, ["k"]), dtype=pl.UInt64))
    layout = custom.table()
    assert layout is not None
    out = custom.apply(KeyedTable(layout), [Arrival(rows, "stage", 0, True)], Tick(1)).frame
    assert out["saw"].to_list() == ["2026-01-03 07:33:20", "2026-01-03 07:33:20"]


def test_a_zone_is_kept() -> None:
    custom = Custom(
        "op",
        ["k"],
        Clocked(),
        pl.Schema({"k": pl.String(), "at": pl.Datetime("us", "Asia/Tokyo")}),
        pl.Schema(OUT),
        on="at",
    )
    assert custom.zone == ZoneInfo("Asia/Tokyo")


# -- keys -------------------------------------------------------------------------------------------------------------


def test_two_keys_of_one_hash_are_two_keys() -> None:
    frame = pl.DataFrame({"k": ["a", "b", "a", "c"], HASH: pl.Series([5, 5, 5, 6], dtype=pl.UInt64)})
    grouped, starts = group_by_key(frame, ["k"])
    assert grouped["k"].to_list() == ["a", "a", "b", "c"] and starts.tolist() == [0, 2, 3]


def test_an_operator_that_has_run_can_still_be_sent() -> None:
    custom = Custom("op", ["k"], Expiring(), FRAME.schema, pl.Schema({"k": pl.String(), "n": pl.Int64()}), on="at")
    before = apply(custom, FRAME).frame
    again = pickle.loads(cloudpickle.dumps(custom))
    assert apply(again, FRAME).frame.equals(before)


# -- batches ----------------------------------------------------------------------------------------------------------


class Gives(ps.BatchOperator):
    total = ps.column(int)

    def __init__(self, what: Any) -> None:
        self.what = what

    def on_batch(self, batch: ps.Batch, state: ps.State) -> Any:
        return self.what(batch, state)


def spoil(name: str, value: Any) -> Any:
    def change(batch: Batch, state: ps.State) -> None:
        setattr(state, name, value)

    return change


@pytest.mark.parametrize(
    "what, says",
    [
        (lambda b, s: 1, "returned int, not a polars DataFrame"),
        (lambda b, s: b.keys, r"missing columns \['n'\]"),
        (lambda b, s: b.frame, r"unknown columns \['at'\]"),
        (lambda b, s: b.keys.with_columns(n=pl.lit("x")), "operator 'op' raised"),
        (lambda b, s: b["nothing"], "nothing"),
        (spoil("nothing", 1), "there is no state 'nothing'"),
        (spoil("total", np.zeros(5)), "state 'total' has shape"),
    ],
)
def test_what_a_batch_operator_gives_back_is_checked(what: Any, says: str) -> None:
    with pytest.raises(UserCodeError, match=says) as error:
        testing.collect(flow_of(Gives(what)))
    assert "operator 'op'" in error.value.message


def test_a_batch_operator_may_give_nothing_and_forget_keys() -> None:
    seen = []

    def look(batch: ps.Batch, state: ps.State) -> None:
        seen.append((len(batch), batch.keys["k"].to_list(), state.new.tolist(), state.total.tolist()))
        state.total += 1
        state.forget(batch.keys["k"].to_numpy() == "b")

    frame = pl.DataFrame({"k": ["a", "b", "a", "b"], "n": [1, 2, 3, 4]})
    out = testing.collect(flow_of(Gives(look), frame), epoch_rows=1)
    assert out.height == 0
    assert seen == [(1, ["a"], [True], [0]), (1, ["b"], [True], [0]), (1, ["a"], [False], [1]), (1, ["b"], [True], [0])]


def test_rows_of_a_batch_come_in_order_of_their_keys() -> None:
    frame = pl.DataFrame({"k": [f"k{i % 7}" for i in range(20)], "n": range(20)})

    def backwards(batch: ps.Batch, state: ps.State) -> pl.DataFrame:
        return batch.frame.reverse()

    custom = Batched("op", ["k"], Gives(backwards), frame.schema, pl.Schema({"k": pl.String(), "n": pl.Int64()}))
    out = apply(custom, frame).frame
    assert out[ORDER].is_sorted() and out[ORDER].to_list() == hash_columns(out, ["k"]).tolist()


class Hoards(ps.Operator):
    def on_event(self, key: str, event: ps.Event, held: ps.Map[str, object], emit: ps.Emit) -> None:
        held["function"] = len


def test_something_that_cannot_be_stored_deep_in_a_state_is_told_in_words() -> None:
    with pytest.raises(UserCodeError, match="a state holds a builtin_function_or_method, which cannot be stored"):
        testing.run(flow_of(Hoards()))


class Behind(ps.BatchOperator):
    """How far behind the watermark at it each row is."""

    def on_batch(self, batch: ps.Batch, state: ps.State) -> pl.DataFrame:
        assert batch.watermarks is not None and batch.clock.tzinfo is not None
        behind = (batch.watermarks - batch["at"].astype("datetime64[us]")) / np.timedelta64(1, "s")
        return batch.frame.select("k", behind=behind)


def test_a_batch_has_the_watermark_at_each_row_whatever_the_cut() -> None:
    start = datetime(2026, 1, 1)
    seconds = [0, 10, 4, 20, 11, None]
    rows = {"k": list("abaabb"), "at": [None if s is None else start + timedelta(seconds=s) for s in seconds]}
    frame = pl.DataFrame(rows, schema={"k": pl.String(), "at": pl.Datetime("us")})
    flow = flow_of(Behind(), frame, {"k": str, "behind": float}, on="at", lateness="3s")
    run = testing.assert_any_cut(flow, epoch_rows=(1, 2, 10))
    assert sorted(run.sinks["out"].rows()) == [("a", -3.0), ("a", -3.0), ("a", 3.0), ("b", -3.0), ("b", 6.0)]
    assert run.dead_letters["reason"].to_list() == ["no time in column 'at'"]


def test_an_operator_that_forgets_its_state_is_found_out_by_cutting() -> None:
    def gaps(batch: ps.Batch, state: ps.State) -> pl.DataFrame:
        return batch.frame.select("k", n=batch["n"] - batch.previous(batch["n"], 0))

    frame = pl.DataFrame({"k": ["a"] * 10, "n": range(10)})
    with pytest.raises(AssertionError, match="sink 'out' differs"):
        testing.assert_any_cut(flow_of(Gives(gaps), frame, {"k": str, "n": int}))
    testing.assert_any_cut(flow_of(Sums(), frame, {"k": str, "n": int}), latest_by={"out": ["k"]})


# -- map and reduce ---------------------------------------------------------------------------------------------------


def lengths(line: ps.Event, emit: ps.Emit) -> None:
    for word in line.text.split():
        emit((word[0], len(word)), 1.0 / (len(word) - 3))


def reduced(key: tuple[str, int], x: float, n: ps.Value[int], emit: ps.Emit) -> None:
    n.set(n.get(0) + 1)
    emit(key[0], key[1], n.get(0))


LINES = pl.DataFrame({"text": ["ab abcd", "abc ab", "ab b"]})
REDUCED = {"first": str, "length": int, "n": int}


def reducing(**how: Any) -> ps.Stream:
    flow = ps.Flow("mr", on_error=how.pop("on_error", "dead_letter"))
    given = {"map": lengths, "reduce": reduced, "key": {"first": str, "length": int}, "value": float, "schema": REDUCED}
    return flow.source("lines", testing.rows(LINES)).map_reduce("op", **{**given, **how})


def test_a_row_whose_map_raises_is_set_aside_whole() -> None:
    out = testing.collect(reducing().sink("out", ps.memory()).flow)
    assert sorted(out.rows()) == [("a", 2, 1), ("a", 2, 2), ("a", 4, 1), ("b", 1, 1)]
    with pytest.raises(UserCodeError, match=r"operator 'op.map' raised ZeroDivisionError.*abc ab"):
        testing.collect(reducing(on_error="fail").sink("out", ps.memory()).flow)


@pytest.mark.parametrize(
    "how, says",
    [
        ({"map": 1}, "map=1 is not a function"),
        ({"reduce": Sums}, "reduce="),
        ({"combine": "x"}, "combine='x' is not a function"),
        ({"key": {"value": str}}, "none of which is 'value'"),
        ({"reduce": lambda key: None}, "reduce must take at least key and value"),
        ({"reduce": lambda key, value, total: None}, "parameter 'total' of reduce"),
        ({"key": object}, "operator 'op'"),
    ],
)
def test_a_bad_map_reduce_is_refused(how: dict[str, Any], says: str) -> None:
    with pytest.raises(FlowError) as error:
        reducing(**how)
    assert says in error.value.message and "operator 'op'" in error.value.message


def test_an_error_in_reduce_names_the_pair() -> None:
    def wrong(key: Any, value: float, emit: ps.Emit) -> None:
        raise ValueError("no")

    with pytest.raises(UserCodeError, match=r"operator 'op' raised ValueError: no .*'value': "):
        testing.collect(reducing(reduce=wrong).sink("out", ps.memory()).flow)
