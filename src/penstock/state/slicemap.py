"""Which slice a key belongs to."""

from __future__ import annotations

import msgspec


class SliceMap(msgspec.Struct, frozen=True):
    """Keys of one stage -> slices, by hash."""

    count: int
