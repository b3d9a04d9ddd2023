"""Which expressions look at one row alone.

``where``, ``select`` and ``with_columns`` see some rows of an epoch at a time. An expression that looks at other rows
(``pl.col("v").max()``, ``.over(...)``, ``.shift()``) would give a result that depends on which rows came together. Such
expressions are found by walking the expression, as polars writes it down.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import polars as pl

NODES = {
    "Len": "len",
    "Agg": "an aggregation",
    "Over": "over",
    "Rolling": "rolling",
    "Sort": "sort",
    "SortBy": "sort_by",
    "Gather": "gather",
    "Slice": "head, tail or slice",
    "Filter": "filter",
    "Explode": "explode",
}
"""Kinds of nodes that look at more than a row, or give more or fewer."""
_NAMES = """
    Append ApproxNUnique ArgMax ArgMin ArgSort ArgUnique ArgWhere Bitwise Correlation Count CumCount CumMax CumMean
    CumMin CumProd CumSum Diff DropNans DropNulls Entropy EwmMean EwmMeanBy EwmStd EwmVar ExtendConstant
    FillNullWithStrategy GatherEvery Hist IndexOf Interpolate InterpolateBy IsDuplicated IsFirstDistinct
    IsLastDistinct IsUnique Kurtosis MaxBy MinBy Mode NullCount HasNulls PctChange PeakMax PeakMin Product QCut
    Quantile RLE RLEID Random Rank Reshape Reverse RollingExpr RollingExprBy SearchSorted Shift ShiftAndFill Skew
    TopK TopKBy Unique UniqueCounts ValueCounts Any All
"""
FUNCTIONS = frozenset(_NAMES.split())
"""Functions that look at more than a row."""
INSTEAD = (
    "An expression sees some rows at a time, and which is chance. Use key_by(...).aggregate(...), a window, or "
    "key_by(...).process(...) for what depends on other rows; ps.last_rows(n) for the rows before; map_batches with a "
    "function from a row to several for explode."
)


def looks_around(expr: Any) -> str | None:
    """What in an expression looks at other rows than its own; None if nothing does."""
    if not isinstance(expr, pl.Expr):
        return None
    try:
        tree = json.loads(expr.meta.serialize(format="json"))
    except Exception:  # nothing that polars can write down: it is tried on rows
        return None
    return next(_found(tree), None)


def _found(node: Any) -> Iterator[str]:
    if node == "Len":
        yield NODES["Len"]
    elif isinstance(node, list):
        for part in node:
            yield from _found(part)
    elif isinstance(node, dict):
        for kind, inside in node.items():
            if kind in NODES:
                yield _aggregation(inside) if kind == "Agg" else NODES[kind]
            elif kind == "Eval":  # of the elements of a list: those of one row
                if inside.get("variant") != "List" and "Array" not in str(inside.get("variant")):
                    yield "cumulative_eval"
                yield from _found(inside["expr"])
            elif kind == "Function":
                if (name := _function(inside["function"])) is not None:
                    yield name
                yield from _found(inside["input"])
            elif kind == "AnonymousFunction":
                if "ROW_SEPARABLE" not in str(inside.get("options", {}).get("flags", "")):
                    yield "map_batches"
                yield from _found(inside["input"])
            elif kind not in ("Column", "Literal", "dtype", "options"):
                yield from _found(inside)


def _aggregation(inside: Any) -> str:
    return _in_words(next(iter(inside))) if isinstance(inside, dict) else NODES["Agg"]


def _function(function: Any) -> str | None:
    if isinstance(function, dict):
        name, more = next(iter(function.items()))
        if name in FUNCTIONS:
            return _in_words(name)
        return _function(more) if name == "Boolean" else None
    return _in_words(function) if isinstance(function, str) and function in FUNCTIONS else None


def _in_words(name: str) -> str:
    """``CumSum`` as users write it: ``cum_sum``."""
    return "".join(f"_{c.lower()}" if c.isupper() and i else c.lower() for i, c in enumerate(name))


__all__ = ["INSTEAD", "looks_around"]
