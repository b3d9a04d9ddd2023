"""The epoch log's records as bytes: a checksum, a line break, one line of JSON."""

from __future__ import annotations

from typing import Any

import msgspec
import xxhash

from penstock.control.records import EpochRecord
from penstock.control.routing import RoutingTable
from penstock.errors import CorruptData

RESTORE = "Restore it from a copy: without it the epochs after the checkpoint cannot be repeated."


def encode(record: EpochRecord) -> bytes:
    fields = {name: getattr(record, name) for name in record.__struct_fields__}
    body = msgspec.json.encode(fields | {"routing": record.routing and record.routing.to_json()})
    return xxhash.xxh3_64_hexdigest(body).encode() + b"\n" + body


def decode(data: bytes, name: str) -> EpochRecord:
    """The record that was written as ``name``. Records of earlier versions of Penstock are taken over."""
    checksum, _, body = data.partition(b"\n")
    if xxhash.xxh3_64_hexdigest(body).encode() != checksum:
        raise CorruptData(f"the epoch log {name} does not match its checksum.", remedy=RESTORE, path=name)
    try:
        fields: dict[str, Any] = msgspec.json.decode(body, type=dict[str, Any])
        if fields.get("routing") is not None:
            fields["routing"] = RoutingTable.from_json(fields["routing"])
        return msgspec.convert(fields, EpochRecord)
    except msgspec.MsgspecError as error:
        raise CorruptData(
            f"the epoch log {name} cannot be read: {error}.",
            remedy="If a newer Penstock wrote it, start the job with that one. If not, restore it from a copy: without "
            "it the epochs after the checkpoint cannot be repeated.",
            path=name,
        ) from error
