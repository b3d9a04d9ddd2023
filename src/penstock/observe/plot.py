"""Pictures of runs and benchmarks: PNG or SVG, by the ending of the file's name.

matplotlib is slow to import, so the functions that draw import it. They make the ``Figure`` directly, without pyplot.
So there is no global state and no display, and any thread may draw.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError
from penstock.extras import need
from penstock.observe.live import rate_series, short
from penstock.observe.status import EpochStatus

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INK = "#1f2933"
_FAINT = "#9aa5b1"
_GRID = "#e4e7eb"
_BLUE = "#2563a8"
_ORANGE = "#d9731a"
_GREEN = "#3a7d44"
_MARK = "#a61b1b"
_PEER = "#b8c4d0"

FORMATS = (".png", ".svg")


def plot_run(
    history: Sequence[Mapping[str, Any]],
    path: str | os.PathLike[str],
    title: str,
    marks: Sequence[tuple[float, str]] = (),
    counted: str = "instances",
) -> Path:
    """Draw throughput, epoch time and instances over the time of a run.

    ``history`` is that of ``JobStatus.to_dict``: at_s, rows, ms and instances of each epoch. ``counted``: what the
    instances are.
    """
    target = _checked_path(path)
    figure = _figure(title, 9.0, 5.6)
    rates, times, counts = figure.subplots(3, 1, sharex=True, gridspec_kw={"height_ratios": [3, 1.6, 1]})
    end = max([float(entry["at_s"]) for entry in history] + [at for at, _ in marks] + [1.0])

    buckets = max(20, min(180, int(end * 2)))
    width = end / buckets
    epochs = [
        EpochStatus(epoch=0, at_s=float(e["at_s"]), rows=int(e["rows"]), ms=float(e.get("ms", 0.0))) for e in history
    ]
    series = rate_series(epochs, buckets, end, end)
    middles = [(index + 0.5) * width for index in range(buckets)]
    rates.fill_between(middles, series, color=_BLUE, alpha=0.15, linewidth=0)
    rates.plot(middles, series, color=_BLUE, linewidth=1.6)
    _style(rates, "rows a second")

    at = [float(entry["at_s"]) for entry in history]
    times.plot(at, [float(entry["ms"]) for entry in history], color=_ORANGE, linewidth=1.0, marker="o", markersize=2.5)
    _style(times, "epoch time, ms")

    instances = [_total(entry.get("instances", 0)) for entry in history]
    counts.step(at, instances, where="post", color=_GREEN, linewidth=1.8)
    counts.set_ylim(0, max([*instances, 1.0]) * 1.25)
    counts.yaxis.get_major_locator().set_params(integer=True)
    _style(counts, counted)
    counts.set_xlabel("seconds since the start", color=_INK, fontsize=9)
    counts.set_xlim(0, end)

    for axes in (rates, times, counts):
        for mark_at, _ in marks:
            axes.axvline(mark_at, color=_MARK, linewidth=1.0, linestyle=(0, (4, 3)), alpha=0.8)
    _label_marks(rates, marks, end)
    return _save(figure, target)


def plot_bars(
    rows: Sequence[Mapping[str, Any]],
    path: str | os.PathLike[str],
    title: str,
    ylabel: str,
) -> Path:
    """Draw one bar for each row with a ``label`` and a ``value``. Penstock's bars stand out.

    If rows have a ``group``, the groups stand along the axis, and each label has one colour.
    """
    target = _checked_path(path)
    groups = list(dict.fromkeys(str(row.get("group", "")) for row in rows))
    labels = list(dict.fromkeys(str(row["label"]) for row in rows))
    figure = _figure(title, max(6.0, 1.5 + 0.75 * len(groups) * max(1, len(labels))), 4.4)
    axes = figure.subplots()
    colours = _bar_colours(labels)
    values = {(str(row.get("group", "")), str(row["label"])): float(row["value"]) for row in rows}
    top = max([*values.values(), 0.0]) or 1.0
    grouped = groups not in ([], [""])
    width = 0.8 / max(1, len(labels)) if grouped else 0.62
    for column, label in enumerate(labels):
        for index, group in enumerate(groups):
            value = values.get((group, label))
            if value is None:
                continue
            middle = index + (column - (len(labels) - 1) / 2) * width if grouped else float(column)
            axes.bar(middle, value, width * 0.92, color=colours[label], label=label if index == 0 else None)
            axes.text(middle, value + top * 0.015, short(value), ha="center", va="bottom", fontsize=8, color=_INK)
    if grouped:
        axes.set_xticks(range(len(groups)), groups)
        axes.legend(
            frameon=False, fontsize=8, labelcolor=_INK, loc="upper left", bbox_to_anchor=(0, -0.08), ncols=len(labels)
        )
    else:
        axes.set_xticks(range(len(labels)), labels)
    _style(axes, ylabel)
    axes.grid(visible=False, axis="x")
    axes.set_ylim(0, top * 1.14)
    return _save(figure, target)


@dataclass(frozen=True)
class Panel:
    """One of several plots above each other that share the time axis. A line is a label with (seconds, value) pairs."""

    ylabel: str
    lines: Mapping[str, Sequence[tuple[float, float]]]
    steps: bool = False
    """Each value holds until the next one, as a number of instances does."""


def plot_series(
    panels: Sequence[Panel],
    path: str | os.PathLike[str],
    title: str,
    marks: Sequence[tuple[float, str]] = (),
) -> Path:
    """Draw several series over the same time. A label has one colour in all panels."""
    target = _checked_path(path)
    figure = _figure(title, 9.0, 1.4 + 1.7 * len(panels))
    rows = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    labels = list(dict.fromkeys(label for panel in panels for label in panel.lines))
    inks = [_BLUE, _ORANGE, _GREEN, _FAINT, _MARK]
    colours = {label: inks[index % len(inks)] for index, label in enumerate(labels)}
    end = max([at for panel in panels for line in panel.lines.values() for at, _ in line] + [1.0])
    for axes, panel in zip(rows, panels, strict=True):
        for label, line in panel.lines.items():
            at, values = [x for x, _ in line], [y for _, y in line]
            style = {"color": colours[label], "linewidth": 1.5, "label": label}
            if panel.steps:
                axes.step(at, values, where="post", **style)
                axes.yaxis.get_major_locator().set_params(integer=True)
            else:
                axes.plot(at, values, **style)
        _style(axes, panel.ylabel)
        for mark_at, _ in marks:
            axes.axvline(mark_at, color=_MARK, linewidth=1.0, linestyle=(0, (4, 3)), alpha=0.8)
    _label_marks(rows[0], marks, end)
    rows[-1].set_xlabel("seconds", color=_INK, fontsize=9)
    rows[-1].set_xlim(0, end)
    if len(labels) > 1:
        drawn = [
            next(line for axes in rows for line in axes.get_lines() if line.get_label() == label) for label in labels
        ]
        # The legend goes below all panels, because the labels of the marks are above the first.
        figure.legend(drawn, labels, frameon=False, fontsize=8, labelcolor=_INK, loc="outside lower left", ncols=4)
    return _save(figure, target)


def _checked_path(path: str | os.PathLike[str]) -> Path:
    target = Path(path)
    if target.suffix.lower() not in FORMATS:
        raise ConfigError(f"{target}: cannot draw a picture of this kind.", remedy="End the name with .png or .svg.")
    return target


def _figure(title: str, width: float, height: float) -> Figure:
    need("matplotlib", "drawing a picture")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=144, layout="constrained", facecolor="white")
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold", color=_INK)
    return figure


def _style(axes: Axes, ylabel: str) -> None:
    from matplotlib.ticker import FuncFormatter

    axes.set_ylabel(ylabel, color=_INK, fontsize=9)
    axes.set_ylim(bottom=0)
    axes.grid(visible=True, color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_INK, labelsize=8, length=0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _position: short(value)))
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_FAINT)


def _label_marks(axes: Axes, marks: Sequence[tuple[float, str]], end: float) -> None:
    """Put labels above the plot, on two levels in turn, so that neighbours do not run into each other."""
    for index, (at, label) in enumerate(sorted(marks)):
        late = at > end * 0.85
        axes.annotate(
            label,
            xy=(at, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(-2 if late else 2, 3 + 11 * (index % 2)),
            textcoords="offset points",
            ha="right" if late else "left",
            fontsize=8,
            color=_MARK,
        )


def _bar_colours(labels: Sequence[str]) -> dict[str, str]:
    peers = [label for label in labels if "penstock" not in label.lower()]
    greys = [_PEER, "#8fa3b5", "#66798a", "#d3dae2", "#4a5a69"]
    colours = dict.fromkeys(labels, _BLUE)
    return colours | {label: greys[index % len(greys)] for index, label in enumerate(peers)}


def _save(figure: Figure, target: Path) -> Path:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(target, format=target.suffix.lower().lstrip("."))
    except OSError as error:
        raise ConfigError(
            f"{target}: cannot be written: {error.strerror}.", remedy="Name a place that can be."
        ) from error
    return target


def _total(instances: Any) -> float:
    """The sum of a number, or of a number for each stage."""
    return float(sum(instances.values()) if isinstance(instances, Mapping) else instances)
