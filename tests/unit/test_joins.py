"""Joins and lookups by example, what is refused when the flow is built, and how rows are kept."""

from __future__ import annotations

import math
from collections import Counter
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

import penstock as ps
from penstock import testing
from penstock.engines.job import start
from penstock.errors import FlowError, SourceError
from penstock.operators import joins
from penstock.operators.base import FOREVER, HASH, NEVER, Arrival, Tick
from penstock.operators.joins import LifetimeJoin
from penstock.operators.rowstore import RowStore
from penstock.state.hashing import hash_columns
from penstock.state.slicemap import SliceMap
from penstock.state.table import KeyedTable, TableSpec

DAY = datetime(2026, 1, 1)


def at(second: float | None) -> datetime | None:
    return None if second is None else DAY + timedelta(seconds=second)


def table(columns: str, *rows: tuple[Any, ...], times: str = "ts") -> pl.DataFrame:
    """Seconds in the columns ``times``."""
    frame = pl.DataFrame(rows, schema=columns.split(), orient="row")
    return frame.with_columns(
        pl.Series(c, [at(s) for s in frame[c].to_list()], dtype=pl.Datetime("us")) for c in times.split()
    )


def seconds(frame: pl.DataFrame) -> list[tuple[Any, ...]]:
    """Rows, times as seconds again, sorted."""
    times = [c for c, t in frame.schema.items() if isinstance(t, pl.Datetime)]
    plain = frame.with_columns((pl.col(c) - DAY).dt.total_seconds() for c in times)
    return sorted(plain.rows(), key=repr)


CLICKS = table("user ts page", ("ann", 1, "a"), ("bob", 2, "b"), ("ann", 9, "c"), (None, 10, "d"))
SESSIONS = table("who start end plan", ("ann", 0, 5, "x"), ("bob", 3, 9, "y"), (None, 4, None, "z"), times="start end")


def two(left: pl.DataFrame, right: pl.DataFrame) -> tuple[ps.Stream, ps.Stream]:
    flow = ps.Flow("two")
    return flow.source("left", testing.rows(left)), flow.source("right", testing.rows(right))


def joined(left: pl.DataFrame, right: pl.DataFrame, keys: tuple[str, str], **how: Any) -> testing.Run:
    """The same for any cut, or it fails."""
    a, b = two(left, right)
    a.key_by(keys[0]).join("join", b.key_by(keys[1]), **how).sink("out", ps.memory())
    return testing.assert_any_cut(a.flow)


# -- by example --------------------------------------------------------------------------------------------------------


def test_points_in_intervals() -> None:
    found = joined(CLICKS, SESSIONS, ("user", "who"), overlap=(ps.point("ts"), ps.interval("start", "end")))
    assert found.sinks["out"].columns == ["user", "ts", "page", "start", "end", "plan"]
    assert seconds(found.sinks["out"]) == [("ann", 1, "a", 0, 5, "x"), (None, 10, "d", 4, None, "z")]


def test_a_left_join_keeps_what_meets_nothing() -> None:
    found = joined(CLICKS, SESSIONS, ("user", "who"), overlap=(ps.point("ts"), ps.interval("start", "end")), how="left")
    assert seconds(found.sinks["out"]) == [
        ("ann", 1, "a", 0, 5, "x"),
        ("ann", 9, "c", None, None, None),
        ("bob", 2, "b", None, None, None),
        (None, 10, "d", 4, None, "z"),
    ]


def test_an_interval_has_its_start_and_not_its_end() -> None:
    left = table("k ts", (1, 0), (1, 1), (1, 2), (1, 3))
    right = table("k f u", (1, 1, 3), times="f u")
    found = joined(left, right, ("k", "k"), overlap=(ps.point("ts"), ps.interval("f", "u")))
    assert [row[1] for row in seconds(found.sinks["out"])] == [1, 2]


def test_within_includes_both_ends_and_duplicates() -> None:
    left = table("k ts", (1, 10), (1, 10))
    right = table("k ts", (1, 4.9), (1, 5), (1, 5), (1, 12), (1, 12.1), (2, 10))
    found = joined(left, right, ("k", "k"), within=ps.within("ts", "ts", before="5s", after="2s"))
    assert found.sinks["out"].columns == ["k", "ts", "ts_right"]
    assert Counter(row[2] for row in seconds(found.sinks["out"])) == {5: 4, 12: 2}


def test_edges_open_and_close() -> None:
    """A second start takes the place of the first; ids tell things of one key apart."""
    left = table("k ts", *((1, s) for s in range(10)))
    edges = table(
        "k ts off lamp",
        (1, 1, False, "a"),
        (1, 2, False, "b"),
        (1, 4, True, "a"),
        (1, 5, False, "a"),
        (1, 6, False, "a"),
        (1, 8, True, "b"),
        (1, 9, True, "b"),
    )
    found = joined(left, edges, ("k", "k"), overlap=(ps.point("ts"), ps.edge("ts", "off", id="lamp")))
    lit = [(row[1], row[2], row[4]) for row in seconds(found.sinks["out"])]
    assert sorted(lit) == sorted(
        [(s, 1, "a") for s in (1, 2, 3)]
        + [(s, 2, "b") for s in range(2, 8)]
        + [(5, 5, "a")]
        + [(s, 6, "a") for s in range(6, 10)]
    )
    (dead,) = found.dead_letters.rows(named=True)
    assert dead["source"] == "join" and "not begun" in dead["reason"] and "'lamp': 'b'" in dead["raw"]
    one = joined(left, edges.head(3), ("k", "k"), overlap=(ps.point("ts"), ps.edge("ts", "off")))
    assert [(row[1], row[2]) for row in seconds(one.sinks["out"])] == [(1, 1), (2, 2), (3, 2)]


def test_the_version_that_held_at_the_time() -> None:
    orders = table("item ts n", ("x", 1, 1), ("x", 5, 2), ("x", 4, 3), ("y", 9, 4))
    prices = table("item since price", ("x", 2, 10), ("x", 5, 11), ("x", 5, 12), ("y", 20, 1), times="since")
    a, b = two(orders, prices)
    a.key_by("item").lookup("price", b.key_by("item"), on="ts", version="since", lateness="2s").sink("out", ps.memory())
    found = testing.assert_any_cut(a.flow)
    assert seconds(found.sinks["out"]) == [
        ("x", 1, 1, None, None),
        ("x", 4, 3, 2, 10),
        ("x", 5, 2, 5, 12),  # of two versions of one time the later one holds
        ("y", 9, 4, None, None),
    ]


def test_versions_of_one_time_from_two_sources() -> None:
    """No order of the two is told by the data; it must not be told by the epochs either."""
    flow = ps.Flow("ties")
    events = flow.source("events", testing.rows(table("k ts", *((1, s) for s in range(12))))).key_by("k")
    one = flow.source("one", testing.rows(table("k at v", *((1, s, f"a{s}") for s in range(0, 12, 2)), times="at")))
    other = flow.source("other", testing.rows(table("k at v", *((1, s, f"b{s}") for s in range(0, 12, 3)), times="at")))
    events.lookup("v", one.union("both", other).key_by("k"), on="ts", version="at").sink("out", ps.memory())
    found = testing.assert_any_cut(flow)
    assert found.sinks["out"].height == 12


def test_what_is_late_is_dropped_on_either_side_and_counted() -> None:
    left = table("k ts", (1, 10), (1, 3), (1, 8))
    right = table("k ts", (1, 3), (1, 8), (1, 2))
    found = joined(left, right, ("k", "k"), within=ps.within("ts", "ts"), lateness="5s")
    assert seconds(found.sinks["out"]) == [(1, 8, 8)]
    testing.assert_late(found, {"join": 2})


def test_rows_that_cannot_live_are_set_aside() -> None:
    right = table("k f u", (1, 1, 1), (1, 5, 2), (1, None, 9), (1, 0, 9), times="f u")
    found = joined(table("k ts", (1, 5)), right, ("k", "k"), overlap=(ps.point("ts"), ps.interval("f", "u")))
    assert seconds(found.sinks["out"]) == [(1, 5, 0, 9)]
    assert sorted(found.dead_letters["reason"].to_list()) == [
        "it ends ('u') before it has begun ('f')",
        "it ends ('u') before it has begun ('f')",
        "no time in column 'f'",
    ]


@pytest.mark.parametrize("dtype", [pl.Datetime("ms"), pl.Datetime("ns", "UTC"), pl.Date()], ids=str)
def test_units_of_time_and_the_year_9999(dtype: Any) -> None:
    far = datetime(2262, 1, 1) if dtype == pl.Datetime("ns", "UTC") else datetime(9999, 12, 31)
    right = pl.DataFrame({"k": [1, 2, 3], "f": [DAY] * 3, "u": [DAY + timedelta(days=2), far, None]})
    right = right.with_columns(
        pl.col("f", "u").dt.cast_time_unit(dtype.time_unit).dt.replace_time_zone(dtype.time_zone)
        if isinstance(dtype, pl.Datetime)
        else pl.col("f", "u").cast(dtype)
    )
    left = pl.DataFrame({"k": [1, 1, 2, 3], "ts": [date(2026, 1, 2), date(2026, 1, 3), *[date(2100, 1, 1)] * 2]})
    found = joined(left, right, ("k", "k"), overlap=(ps.point("ts"), ps.interval("f", "u")))
    assert sorted(found.sinks["out"].select("k", "ts").rows()) == [
        (1, date(2026, 1, 2)),
        (2, date(2100, 1, 1)),
        (3, date(2100, 1, 1)),
    ]
    assert not found.dead_letters.height


def test_null_and_nan_are_keys_like_any_other() -> None:
    frame = pl.DataFrame({"k": [math.nan, None, -0.0], "ts": [DAY] * 3, "i": [1, 2, 3]})
    right = pl.DataFrame({"k": [None, 0.0, math.nan], "ts": [DAY] * 3, "j": [2, 3, 1]})
    found = joined(frame, right, ("k", "k"), within=ps.within("ts", "ts"))
    assert sorted(found.sinks["out"].select("i", "j").rows()) == [(1, 1), (2, 2), (3, 3)]


def test_a_stream_may_meet_itself() -> None:
    frame = table("k ts n", (1, 0, 1), (1, 3, 2), (1, 9, 3))
    flow = ps.Flow("self")
    keyed = flow.source("in", testing.rows(frame)).key_by("k")
    keyed.join("join", keyed, within=ps.within("ts", "ts", after="5s")).sink("out", ps.memory())
    found = testing.assert_any_cut(flow)
    assert sorted(found.sinks["out"].select("n", "n_right").rows()) == [(1, 1), (1, 2), (2, 2), (3, 3)]


def test_results_of_windows_can_be_joined() -> None:
    flow = ps.Flow("rates")
    keyed = [flow.source(s, testing.rows(table("k ts", *((i % 2, i) for i in range(20))))).key_by("k") for s in "ab"]
    counts = [
        k.window(ps.tumbling("5s", on="ts")).aggregate(f"count-{s}", n=ps.count())
        for k, s in zip(keyed, "ab", strict=True)
    ]
    same = ps.within("window_start", "window_start")
    counts[0].key_by("k").join("join", counts[1].key_by("k"), within=same).sink("out", ps.memory())
    found = testing.assert_any_cut(flow)
    assert found.sinks["out"].height == 8 and not found.late
    assert (found.sinks["out"]["n"] == found.sinks["out"]["n_right"]).all()


def test_a_job_that_crashed_goes_on_where_it_was(tmp_path: Path) -> None:
    left = table("k ts n", *((i % 3, i, f"l{i}") for i in range(60)))
    right = table("k f u s", *((i % 3, i, i + 7, f"r{i}") for i in range(60)), times="f u")

    def flow(source: ps.Source, out: ps.Sink) -> ps.Flow:
        made = ps.Flow("crash")
        a, b = made.source("left", source).key_by("k"), made.source("right", testing.rows(right)).key_by("k")
        a.join("join", b, overlap=(ps.point("ts"), ps.interval("f", "u")), how="left").sink("out", out)
        return made

    config = ps.Config(instances=2, epoch_rows=7, checkpoint=str(tmp_path / "state"), checkpoint_interval_s=0)
    source = testing.CrashingSource(testing.rows(left), 30)
    with pytest.raises(SourceError):
        start(flow(source, ps.parquet(tmp_path / "out")), engine="local", config=config).wait(120)
    assert start(flow(source, ps.parquet(tmp_path / "out")), engine="local", config=config).wait(120)
    undisturbed = testing.collect(flow(testing.rows(left), ps.memory()))
    assert Counter(ps.read_output(tmp_path / "out").select(undisturbed.columns).rows()) == Counter(undisturbed.rows())
    assert undisturbed.height > 60


# -- a static table ----------------------------------------------------------------------------------------------------

CITIES = pl.DataFrame({"zip": [1, 2, None], "city": ["Ulm", "Bonn", "?"], "n": [1.0, 2.0, 3.0]})
VISITS = pl.DataFrame({"zip": [2, 7, None, 2], "n": [1, 2, 3, 4]})


@pytest.mark.parametrize("kind", ["frame", "parquet", "csv"])
def test_a_static_lookup(kind: str, tmp_path: Path) -> None:
    table: Any = CITIES
    if kind == "parquet":
        table = tmp_path / "cities.parquet"
        CITIES.write_parquet(table)
    elif kind == "csv":
        table = str(tmp_path / "cities.csv")
        CITIES.write_csv(table)
    flow = ps.Flow("static")
    flow.source("in", testing.rows(VISITS)).lookup("city", table, on="zip").sink("out", ps.memory())
    out = testing.assert_any_cut(flow).sinks["out"]
    assert out.schema == {"zip": pl.Int64, "n": pl.Int64, "city": pl.String, "n_right": pl.Float64}
    assert out.rows() == [(2, 1, "Bonn", 2.0), (7, 2, None, None), (None, 3, "?", 3.0), (2, 4, "Bonn", 2.0)]


def test_an_inner_lookup_drops_what_it_does_not_find() -> None:
    flow = ps.Flow("static")
    stream = flow.source("in", testing.rows(VISITS)).lookup("city", CITIES, on=["zip"], how="inner")
    stream.key_by("city").aggregate("count", n=ps.count()).sink("out", ps.memory())
    assert sorted(testing.collect(flow).rows()) == [("?", 1), ("Bonn", 2)]


def test_a_lookup_keeps_what_a_stream_is() -> None:
    flow = ps.Flow("static")
    counts = flow.source("in", testing.rows(VISITS)).key_by("zip").aggregate("count", n=ps.count())
    assert counts.lookup("city", CITIES, on="zip").identity == ("zip",) == counts.identity


# -- refused -----------------------------------------------------------------------------------------------------------

OVERLAP = (ps.point("ts"), ps.interval("start", "end"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "does not say how rows meet"),
        ({"overlap": OVERLAP, "within": ps.within("ts", "start")}, "does not say how rows meet"),
        ({"overlap": ps.point("ts")}, "does not say how rows meet"),
        ({"overlap": (ps.point("tz"), OVERLAP[1])}, "no column 'tz'"),
        ({"overlap": (ps.point("page"), OVERLAP[1])}, "'page' has type String, not a time"),
        ({"overlap": (ps.edge("ts", "page"), OVERLAP[1])}, "'page' has type String, not Boolean"),
        ({"overlap": OVERLAP, "how": "outer"}, "how='outer' is not known"),
        ({"overlap": OVERLAP, "lateness": -1}, "lateness cannot be negative"),
        ({"overlap": OVERLAP, "lateness": "soon"}, "'soon' is not a duration"),
    ],
)
def test_a_join_that_makes_no_sense(given: dict[str, Any], message: str) -> None:
    a, b = two(CLICKS, SESSIONS)
    with pytest.raises(FlowError, match=message):
        a.key_by("user").join("join", b.key_by("who"), **given)


def test_keys_must_agree() -> None:
    a, b = two(CLICKS, SESSIONS)
    with pytest.raises(FlowError, match=r"key 'user' of the left side is String, key 'start' of the right is Datetime"):
        a.key_by("user").join("join", b.key_by("start"), overlap=OVERLAP)
    with pytest.raises(FlowError, match="keyed by user, the right by who, plan"):
        a.key_by("user").join("join", b.key_by("who", "plan"), overlap=OVERLAP)


def test_only_keyed_streams_of_one_flow() -> None:
    a, b = two(CLICKS, SESSIONS)
    with pytest.raises(FlowError, match="is a Stream, not a keyed stream"):
        a.key_by("user").join("join", b, overlap=OVERLAP)  # type: ignore[arg-type]
    with pytest.raises(FlowError, match="belongs to another flow"):
        a.key_by("user").join("join", two(CLICKS, SESSIONS)[1].key_by("who"), overlap=OVERLAP)
    with pytest.raises(FlowError, match="DataFrame, not a keyed stream"):
        a.key_by("user").lookup("look", CITIES, on="ts", version="since")  # type: ignore[arg-type]
    with pytest.raises(FlowError, match="KeyedStream is not a table"):
        a.lookup("look", b.key_by("who"), on="user")  # type: ignore[arg-type]


def test_updates_are_not_joined() -> None:
    a, b = two(CLICKS, SESSIONS)
    latest = a.key_by("user").aggregate("latest", ts=ps.max("ts"))
    with pytest.raises(FlowError, match="'latest' is a stream of updates"):
        latest.key_by("user").join("join", b.key_by("who"), overlap=OVERLAP)


def test_names_that_clash() -> None:
    a, b = two(CLICKS, SESSIONS.with_columns(page=pl.lit(1)))
    stream = a.key_by("user").join("join", b.key_by("who"), overlap=OVERLAP, suffix="_of_session")
    assert stream.schema.names() == ["user", "ts", "page", "start", "end", "plan", "page_of_session"]
    again, b = two(CLICKS.with_columns(page_right=pl.lit(1)), SESSIONS.with_columns(page=pl.lit(1)))
    with pytest.raises(FlowError, match="would be called 'page_right', which is taken"):
        again.key_by("user").join("join", b.key_by("who"), overlap=OVERLAP)


def test_a_span_must_not_be_empty() -> None:
    with pytest.raises(FlowError, match="ends before it begins"):
        ps.within("a", "b", before=-5, after=4)


@pytest.mark.parametrize(
    ("table", "on", "message"),
    [
        (CITIES, "page", "the table has no column 'page'"),
        (CITIES, "zap", "no column 'zap'"),
        (CITIES.rename({"n": "user"}), "user", "'user' is String in the stream and Float64 in the table"),
        (pl.DataFrame({"user": ["a", "b", "a"]}), "user", "not unique"),
        ("nowhere.parquet", "user", "cannot be read"),
        ("table.xlsx", "user", "neither .parquet nor .csv"),
        (CITIES, [], "at least one column"),
    ],
)
def test_a_table_that_cannot_be_looked_up(table: Any, on: Any, message: str) -> None:
    with pytest.raises(FlowError, match=message):
        two(CLICKS, SESSIONS)[0].lookup("look", table, on=on)


def test_explain_says_what_meets_what() -> None:
    a, b = two(CLICKS, SESSIONS)
    a.key_by("user").join("join", b.key_by("who"), overlap=OVERLAP).sink("out", ps.memory())
    assert "inner join of point(ts) with interval(start, end)" in a.flow.explain()


# -- inside ------------------------------------------------------------------------------------------------------------


def test_one_long_lifetime_does_not_make_all_of_them_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many short intervals and a few that never end, one key: as many candidates as matches, about."""
    count = 4000
    t = np.arange(count, dtype=np.int64) * 1000
    end = t + 1500
    end[::1000] = FOREVER
    groups = np.zeros(2 * count, dtype=np.int64)
    start = np.concatenate([t, t + 100])
    ends = np.concatenate([end, t + 101])
    order = np.argsort(start, kind="stable")
    start, ends = start[order], ends[order]
    under, fresh = np.flatnonzero(order < count), np.flatnonzero(order >= count)
    looked_at = 0
    plain = np.repeat

    def counted(values: Any, repeats: Any) -> Any:
        nonlocal looked_at
        looked_at += int(np.sum(repeats))
        return plain(values, repeats)

    monkeypatch.setattr(joins.np, "repeat", counted)
    u, f = joins._starting_inside(groups, start, ends, under, fresh, ties=True)
    assert len(u) == sum(int(((start[under] <= start[x]) & (start[x] < ends[under])).sum()) for x in fresh)
    assert looked_at < 4 * (len(u) + 2 * count)
    assert (start[u] <= start[f]).all()


def test_state_stays_small_while_time_goes_on() -> None:
    left, right = table("k ts", (1, 0)).schema, table("k f u", (1, 0, 0), times="f u").schema
    join = LifetimeJoin("j", (["k"], left), (["k"], right), (ps.point("ts"), ps.interval("f", "u")), how="left")
    state = KeyedTable(join.table())
    mark, found = NEVER, 0
    for epoch in range(1, 40):
        arrivals = []
        rows = [(i % 10, epoch * 100 + i) for i in range(100)]
        for port, frame in enumerate(
            (table("k ts", *rows), table("k f u", *((k, s, s + 20) for k, s in rows), times="f u"))
        ):
            prepared = join.prepare(frame, True, port)
            hashed = prepared.frame.with_columns(pl.Series(HASH, hash_columns(prepared.frame, ["k"])))
            arrivals.append(Arrival(hashed, f"in{port}", 0, True, mark, port))
            assert prepared.time_max is not None
            now = prepared.time_max
        found += join.apply(state, arrivals, Tick(epoch, mark, now, 0, ((mark, now),) * 2)).frame.height
        mark = now
        state.seal(epoch)
        assert state.rows_live <= 30
    assert found == 39 * 200 - 10 - 2  # each second once more with its predecessor; the last second waits


EVERYTHING = pl.DataFrame(
    [
        pl.Series("i8", [-128, None, 127], dtype=pl.Int8),
        pl.Series("u32", [0, None, 2**32 - 1], dtype=pl.UInt32),
        pl.Series("u64", [0, None, 2**64 - 1], dtype=pl.UInt64),
        pl.Series("i128", [-(2**100), None, 2**100], dtype=pl.Int128),
        pl.Series("f32", [math.nan, None, -0.0], dtype=pl.Float32),
        pl.Series("f64", [math.inf, None, 5e-324], dtype=pl.Float64),
        pl.Series("flag", [True, None, False]),
        pl.Series("text", ["", None, "ß\0x"]),
        pl.Series("bytes", [b"", None, b"\xff\0"]),
        pl.Series("date", [date(1, 1, 1), None, date(9999, 12, 31)]),
        pl.Series("time", [time(0), None, time(23, 59, 59, 999_999)]),
        pl.Series("ns", [-1, None, 2**62], dtype=pl.Datetime("ns")),
        pl.Series("zone", [-1, None, 2**50], dtype=pl.Datetime("us", "Europe/Berlin")),
        pl.Series("span", [-1, None, 2**62], dtype=pl.Duration("ns")),
        pl.Series("decimal", [Decimal("-1.10"), None, Decimal("12345678901234.56")], dtype=pl.Decimal(20, 2)),
        pl.Series("enum", ["b", None, "a"], dtype=pl.Enum(["a", "b"])),
        pl.Series("list", [[1, None], None, []], dtype=pl.List(pl.Datetime("ns"))),
        pl.Series(
            "struct",
            [{"a": 1, "b": 0.1}, None, {"a": None, "b": None}],
            dtype=pl.Struct({"a": pl.Time, "b": pl.Float32}),
        ),
        pl.Series("nothing", [None, None, None], dtype=pl.Null),
    ]
)


@pytest.mark.parametrize("shared", [False, True])
def test_rows_of_every_type_come_back_as_they_were(shared: bool) -> None:
    store = RowStore(EVERYTHING.schema, shared=shared)
    keys = pl.DataFrame({"key": [1, 2, 3]})
    hashes = hash_columns(keys, ["key"])
    state = KeyedTable(TableSpec(keys.schema, store.values))
    rows, _ = state.upsert(hashes, keys)
    store.write(state, rows, EVERYTHING)
    state.seal(1)
    rows, _ = state.upsert(hashes, keys)
    store.write(state, rows, EVERYTHING.reverse())
    assert pl.DataFrame(store.read(state, rows)).equals(EVERYTHING.reverse(), null_equal=True)
    assert state.undo_to(1)
    copy = KeyedTable(TableSpec(keys.schema, store.values))
    copy.load(state.export(range(4), SliceMap(4)))
    for held in (state, copy):
        back = pl.DataFrame(store.read(held, held.find(hashes, keys)))
        assert back.schema == EVERYTHING.schema
        assert back.equals(EVERYTHING, null_equal=True)
        assert math.copysign(1, back["f32"][2]) == -1


def test_two_sides_share_their_columns() -> None:
    a = RowStore(pl.Schema({"x": pl.Float64(), "n": pl.Int64(), "s": pl.String()}), shared=True)
    b = RowStore(pl.Schema({"t": pl.Date(), "y": pl.Float64(), "z": pl.Float64()}), shared=True)
    assert len({**a.values, **b.values}) == len(a.values) + 2  # one more float, and where it is absent
