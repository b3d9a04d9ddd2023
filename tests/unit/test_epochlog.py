"""Records of the epoch log: what is not understood is refused, and what an earlier version wrote is taken over."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import xxhash

from penstock.control.records import EpochRecord, SourceSpan
from penstock.control.routing import RoutingTable
from penstock.engines.epochlog import decode, encode
from penstock.errors import CorruptData
from penstock.ids import Attempt, Epoch, RoutingVersion, StageId

IN, COUNT = StageId("in"), StageId("count")
OLD_ROUTING = {
    "version": 3,
    "slices": 8,
    "owners": {"count": [0, 0, 0, 0, 1, 1, 1, 1]},
    "instances": {"in": 2, "count": 2},
}
OLD: dict[str, Any] = {
    "epoch": 7,
    "attempt": 2,
    "ranges": {"in": {"start": {"row": 5}, "end": {"row": 9}, "rows": 4, "facts": [1]}},
    "clock_ms": 12,
    "final": False,
    "version": 3,
    "routing": OLD_ROUTING,
}


def written(fields: dict[str, Any]) -> bytes:
    body = msgspec.json.encode(fields)
    return xxhash.xxh3_64_hexdigest(body).encode() + b"\n" + body


def test_a_record_comes_back_equal_with_homes_and_core_limits() -> None:
    table = RoutingTable.initial(8, {IN: False, COUNT: True}, 2)
    table = table.change(homes={COUNT: {0: "a", 1: "b"}}, cores={"a": 1})
    record = EpochRecord(
        epoch=Epoch(7),
        attempt=Attempt(2),
        ranges={"in": SourceSpan(start={"row": 5}, end={"row": 9}, rows=4, facts=[1])},
        clock_ms=12,
        final=True,
        version=RoutingVersion(2),
        routing=table,
    )
    assert decode(encode(record), "log/7") == record


def test_a_record_of_the_version_before_is_taken_over() -> None:
    record = decode(written(OLD), "log/7")
    assert (record.epoch, record.attempt, record.rows, record.clock_ms) == (7, 2, 4, 12)
    assert record.ranges["in"].facts == [1] and record.routing is not None
    assert record.routing.slices_in(COUNT) == 8 and record.routing.owners[COUNT] == (0, 0, 0, 0, 1, 1, 1, 1)
    assert record.routing.homes == {} and record.routing.cores == {}


def test_an_unknown_field_is_refused() -> None:
    with pytest.raises(CorruptData, match=r"log/7 cannot be read.*mood") as caught:
        decode(written({**OLD, "mood": "fine"}), "log/7")
    assert "newer Penstock" in caught.value.remedy


def test_a_changed_byte_is_refused() -> None:
    data = written(OLD)
    with pytest.raises(CorruptData, match="does not match its checksum"):
        decode(data[:-2] + b" }", "log/7")
