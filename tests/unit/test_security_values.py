"""Values that are kept come back as they were, and reading them never runs anything."""

import datetime as dt
import os
import pickle
import re
from decimal import Decimal
from pathlib import Path
from zoneinfo import ZoneInfo

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.operators.rowstore import RowStore
from penstock.operators.topk import TopK
from penstock.state.table import KeyedTable, TableSpec
from penstock.state.values import DEPTH_MAX, NotPlain, decode_value, encode_value

SOURCE = Path(__file__).resolve().parents[2] / "src" / "penstock"

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.decimals(allow_nan=False)
    | st.datetimes(timezones=st.none() | st.just(dt.UTC) | st.just(ZoneInfo("Europe/Paris")))
    | st.dates()
    | st.times()
    | st.timedeltas()
)
hashable = st.integers() | st.text() | st.dates() | st.tuples(st.integers(), st.text())
values = st.recursive(
    scalars | st.sets(hashable) | st.frozensets(hashable),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(hashable, inner),
    max_leaves=20,
)


def typed(value: object) -> object:
    """The value with the type of everything in it: True equals 1, and a datetime its own in another zone."""
    if isinstance(value, list | tuple):
        return type(value), [typed(v) for v in value]
    if isinstance(value, set | frozenset):
        return type(value), {typed(v) if not isinstance(v, tuple) else v for v in value}
    if isinstance(value, dict):
        return dict, [(typed(k), typed(v)) for k, v in value.items()]
    if isinstance(value, dt.datetime):
        return value.isoformat(), value.fold, str(value.tzinfo)
    return type(value), str(value)


@given(values)
def test_every_plain_value_comes_back(value: object) -> None:
    assert typed(decode_value(encode_value(value))) == typed(value)


@pytest.mark.parametrize("value", [np.int8(-3), np.float32(1.5), np.bool_(True), np.datetime64("2024-01-01", "ns")])
def test_numbers_of_numpy_come_back_with_their_type(value: np.generic) -> None:
    back = decode_value(encode_value(value))
    assert back == value and back.dtype == value.dtype


class Trap:
    """What a pickle of it does when it is read."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> object:
        return os.mkdir, (str(self.place),)


def test_a_pickle_in_a_state_is_refused_and_does_nothing(tmp_path: Path) -> None:
    trap = pickle.dumps(Trap(tmp_path / "run"), protocol=5)
    schema = pl.Schema({"nested": pl.List(pl.Int64), "price": pl.Decimal(10, 2)})
    for kind in RowStore(schema).values.values():
        assert kind.codec is not None
        with pytest.raises(NotPlain):
            kind.codec.decode(trap)
    assert not (tmp_path / "run").exists()


def test_what_is_no_plain_value_is_refused_when_it_is_kept(tmp_path: Path) -> None:
    with pytest.raises(NotPlain, match="Trap"):
        encode_value([Trap(tmp_path)])
    deep: object = 1
    for _ in range(DEPTH_MAX + 1):
        deep = [deep]
    with pytest.raises(NotPlain, match="deep"):
        encode_value(deep)


@pytest.mark.parametrize(
    "data", [b"", b"\x80\x05.", b"\xc7\x01\x63x", b"\xd4\x02x", b"\xc7\x03\x0b|O8", b"\x91" * 9_999]
)
def test_bytes_that_are_no_value_are_refused(data: bytes) -> None:
    with pytest.raises(NotPlain):
        decode_value(data)


def test_rows_of_nested_values_and_decimals_come_back() -> None:
    schema = pl.Schema(
        {"d": pl.Decimal(20, 2), "l": pl.List(pl.Int64), "s": pl.Struct({"at": pl.Datetime("ns"), "big": pl.Int128})}
    )
    rows = [
        (Decimal("1.20"), [1, None], {"at": dt.datetime(2024, 1, 1), "big": 2**100}),
        (None, None, {"at": None, "big": None}),
    ]
    frame = pl.DataFrame(rows, schema, orient="row")
    store = RowStore(schema)
    table = KeyedTable(TableSpec(pl.Schema({"k": pl.Int64}), store.values))
    at, _ = table.upsert(np.arange(2, dtype=np.uint64), pl.DataFrame({"k": [1, 2]}))
    store.write(table, at, frame)
    codecs = [k.codec for k in store.values.values() if k.codec]
    for codec, name in zip(codecs, schema, strict=True):
        column = table.column(name)
        column[at] = [codec.decode(codec.encode(v)) for v in column[at].tolist()]
    assert pl.DataFrame(store.read(table, at)).equals(frame)


def test_a_state_that_held_pickles_is_another_state() -> None:
    nested = pl.Schema({"group": pl.String, "tags": pl.List(pl.String), "n": pl.Int64})
    plain = pl.Schema({"group": pl.String, "id": pl.Int64, "n": pl.Int64})

    def fingerprint(schema: pl.Schema, row: tuple[str, ...]) -> dict[str, object]:
        return TopK("best", 3, "n", ("group",), schema, identity=row, whole_groups=False).fingerprint()

    assert fingerprint(nested, ("n",))["values"] == "plain"
    assert "values" not in fingerprint(plain, ("id",)), "a state without such values is taken over as it is"


def test_nothing_that_is_read_from_a_store_is_unpickled() -> None:
    """Pickles are read in two places: the plan that a worker is sent, over a connection that authenticates, and the
    answer of a child process."""
    found = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if re.search(r"pickle\.loads?\(|Unpickler|marshal\.loads|dill|joblib|shelve|yaml\.load\(", path.read_text())
    }
    assert found == {"engines/spark/worker.py", "engines/merging.py", "connectors/spark_sources.py"}
