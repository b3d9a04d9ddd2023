"""What a container measures of its slices: the rows that come for each slice, and the hottest keys of single slices.

Rows are counted by the hash that they carry from the shuffle. A sample of a large epoch is enough: 16,384 rows drawn at
random tell the share of a slice that has a 64th of the rows to within 6 %, and several epochs are added up before they
are reported. The sample is drawn with a seed, so that the same epoch gives the same figures. It is random, and not
every n-th row, because keys that come in turn would spoil such a sample.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl
from numpy.typing import NDArray

from penstock.operators.base import HASH
from penstock.state.slicemap import SliceMap

SAMPLE_ROWS = 16_384
"""Rows of an epoch that are counted by slice."""
KEYS_SAMPLE_ROWS = 131_072
"""Rows of an epoch among which the hottest keys are looked for."""
KEYS_MAX = 5
"""Keys that are reported of a slice."""
KEY_CHARS_MAX = 80
"""Longer keys are cut off in reports."""


def rows_by_slice(frames: Sequence[pl.DataFrame], slicemap: SliceMap, seed: int) -> NDArray[np.float64]:
    """For each slice, about how many of these rows belong to it."""
    counts = np.zeros(slicemap.count)
    total = sum(f.height for f in frames)
    for frame in frames:
        if not frame.height or HASH not in frame.columns:
            continue
        hashes = frame[HASH].to_numpy()
        weight = 1.0
        wanted = max(1, SAMPLE_ROWS * frame.height // total)
        if wanted < frame.height:
            hashes = hashes[np.random.default_rng(seed).integers(0, frame.height, wanted)]
            weight = frame.height / wanted
        counts += weight * np.bincount(slicemap.of(hashes), minlength=slicemap.count)
    return counts


def hottest_keys(
    frames: Sequence[pl.DataFrame], key: Sequence[str], slicemap: SliceMap, number: int, seed: int
) -> list[tuple[str, float]]:
    """The keys of one slice with the most rows, each with its share of the slice's rows."""
    if not key:
        return []  # an operator without a key has one group of rows
    found = []
    total = sum(f.height for f in frames)
    for frame in frames:
        if not frame.height or HASH not in frame.columns or any(k not in frame.columns for k in key):
            continue
        wanted = max(1, KEYS_SAMPLE_ROWS * frame.height // total)
        if wanted < frame.height:
            rows = np.random.default_rng(seed).integers(0, frame.height, wanted)
            frame = frame.select(*key, HASH)[pl.Series(rows)]
        found.append(frame.filter(pl.Series(slicemap.mask(frame[HASH].to_numpy(), [number]))).select(key))
    rows_here = pl.concat(found) if found else pl.DataFrame()
    if not rows_here.height:
        return []
    counts = rows_here.group_by(key, maintain_order=True).len(name="__rows")
    counts = counts.sort("__rows", descending=True, maintain_order=True)
    return [(_text(values), round(count / rows_here.height, 4)) for *values, count in counts.head(KEYS_MAX).iter_rows()]


def _text(values: Sequence[object]) -> str:
    text = ", ".join(map(str, values))
    return text if len(text) <= KEY_CHARS_MAX else text[: KEY_CHARS_MAX - 3] + "..."


__all__ = ["hottest_keys", "rows_by_slice"]
