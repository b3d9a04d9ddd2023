"""Measures the load of slices: the rows that arrive for each slice of a container, and the hottest keys of a slice.

Rows are counted by the hash that they carry from the shuffle. For a large epoch a sample is enough: 16,384 rows drawn
at random give the share of a slice with a 64th of the rows to within 6 %, and several epochs are added up before the
figures are used. The sample is drawn with a seed, so the same epoch gives the same figures. It is random, for keys may
arrive in turn, and every n-th row would then be of the same few keys.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl
from numpy.typing import NDArray

from penstock.operators.base import HASH
from penstock.state.hashing import slice_of

SAMPLE_ROWS = 16_384
KEYS_SAMPLE_ROWS = 131_072
KEYS_MAX = 5
KEY_CHARS_MAX = 80


def rows_by_slice(frames: Sequence[pl.DataFrame], slices: int, seed: int) -> NDArray[np.float64]:
    """An estimate of how many of these rows belong to each slice."""
    counts = np.zeros(slices)
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
        counts += weight * np.bincount(slice_of(hashes, slices), minlength=slices)
    return counts


def hottest_keys(
    frames: Sequence[pl.DataFrame], key: Sequence[str], slices: int, number: int, seed: int
) -> list[tuple[str, float]]:
    """The keys of one slice with the most rows, and what share of its rows each has."""
    if not key:
        return []  # without a key all rows have the same one
    found = []
    total = sum(f.height for f in frames)
    for frame in frames:
        if not frame.height or HASH not in frame.columns or any(k not in frame.columns for k in key):
            continue
        wanted = max(1, KEYS_SAMPLE_ROWS * frame.height // total)
        if wanted < frame.height:
            rows = np.random.default_rng(seed).integers(0, frame.height, wanted)
            frame = frame.select(*key, HASH)[pl.Series(rows)]
        found.append(frame.filter(pl.Series(slice_of(frame[HASH].to_numpy(), slices) == number)).select(key))
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
