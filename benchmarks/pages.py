"""Writes ``docs/benchmarks.md`` and the figures of the README from ``benchmarks/results/*.json``: ``make bench-page``.

The page has one section for each benchmark that has a result. A section says what the benchmark measures, which command
repeats it, when and where the result was taken, and the figures. The README has one line for each of ``HEADLINES``.
Nobody edits either: ``tests/unit/test_pages.py`` fails when they and the JSON files differ.

A new benchmark gets a section without a change here. ``SECTIONS`` makes the section readable: it names the columns of
the tables and says what each ratio means.
"""

from __future__ import annotations

import ast
import json
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
README = ROOT / "README.md"
_BEGIN, _END = "<!-- figures:begin -->\n", "<!-- figures:end -->"

Row = Mapping[str, Any]

HEAD = """# Figures of all benchmarks

A program writes this page from [benchmarks/results](../benchmarks/results): `make bench-page`. Do not edit it.

Each section shows one result as it was taken. [benchmarks/README.md](../benchmarks/README.md) says how the benchmarks
measure and how to read them. Trust ratios more than absolute figures: contenders of one ratio ran in turn on the same
machine, and different sections were taken on different machines and with different versions. Shared machines are noisy.
A table shows the median over the runs of its row; `runs` is their number.
"""


@dataclass(frozen=True)
class Table:
    """The rows of a result that have the first of ``figures``, summed up by contender and ``by``."""

    by: tuple[str, ...]
    figures: tuple[str, ...]
    title: str = ""


@dataclass(frozen=True)
class Section:
    """How one benchmark is shown."""

    tables: tuple[Table, ...] = ()
    ratios: Mapping[str, str] = field(default_factory=dict)
    """Pattern of a ratio's name -> what the ratio means. The first pattern that fits counts."""


_SPEED = ("rows_s", "batch_ms_p50", "memory_mb")
_PAIRS = {
    "latency_*": "batch time, Penstock / the other: less is better",
    "memory_*": "peak memory, Penstock / the other: less is better",
    "vs_*": "throughput, Penstock / the other: more is better",
}
_DELAYS = ("delay_s", "delay_epochs", "to_next_output_s", "done_s")

SECTIONS: Mapping[str, Section] = {
    "words": Section((Table(("batch_words",), _SPEED),), _PAIRS),
    "windows": Section((Table(("batch_words",), _SPEED),), _PAIRS),
    "custom-state": Section(
        (Table(("batch_words",), _SPEED),),
        {
            "*_memory_vs_spark*": "peak memory, Penstock / Spark's fastest: less is better",
            "per_event_vs_spark*": "throughput, `ps.Operator` / Spark's fastest of the same batch size",
            "batch_vs_spark*": "throughput, `ps.BatchOperator` / Spark's fastest of the same batch size",
        },
    ),
    "similarity": Section(
        (
            Table(("window",), ("us_per_event", "rows_s", "memory_mb"), "Tweets compared with a window of tweets"),
            Table((), ("rows_s", "state_rows", "memory_mb"), "All contenders"),
        ),
        {
            "linear_r2": "how well a line describes the time of an event by the length of the window: 1 is exact",
            "us_per_event_and_1x": "microseconds that one more length of the shortest window adds to an event",
            "us_per_event_*": "microseconds an event, by the length of the window",
            "scale_independent_10x": "throughput with ten times the state / with the state: 1 means no loss",
            "top_words_10x": "throughput of a running top 100, with ten times the state / with the state",
        },
    ),
    "slices": Section(
        (Table((), _SPEED),), {"slices_*_vs_1": "throughput with this number of slices / with one: 1 means no cost"}
    ),
    "checkpoint": Section(
        (
            Table((), ("rows_s", "batch_ms_p50"), "Throughput with and without checkpoints"),
            Table(("touched_pct",), ("touched_keys", "delta_bytes", "bytes_per_touched_key"), "Size of a checkpoint"),
            Table(
                ("state_mb",),
                ("epoch_ms_average", "epoch_ms_p99", "epoch_ms_worst", "worst_vs_average"),
                "Epochs beside a checkpoint",
            ),
        ),
        {
            "checkpoint_2s_vs_none": "throughput with a checkpoint every 2 s / without",
            "bytes_per_touched_key_*": "bytes of a delta for each key that changed, by the share of keys that did",
            "delta_linear_r2": "how well a line describes the bytes by the changed keys: 1 is exact",
            "bytes_per_key_spread": "the largest bytes per changed key / the smallest: 1 is exactly proportional",
            "worst_vs_average*": "the worst epoch / the average epoch, with deltas in the background",
            "full_worst_vs_average*": "the worst epoch / the average epoch, with synchronous full snapshots",
            "average_epoch_vs_full_*": "average epoch, deltas in the background / full snapshots: less is better",
            "worst_epoch_vs_full_*": "worst epoch, deltas in the background / full snapshots: less is better",
        },
    ),
    "recovery": Section(
        (
            Table(
                ("state_mb", "executors", "kills", "backups", "interval_s"),
                ("to_next_output_s", "rebuild_s"),
                "Seconds from SIGKILL to the next new output, and seconds of these to bring lost slices up",
            ),
        ),
        {
            "vs_structured_streaming*": "time to the next new output, Structured Streaming / Penstock",
            "to_next_output_s_interval_*": "seconds to the next new output, by seconds between checkpoints",
            "to_next_output_s_*": "seconds to the next new output, by size of state",
            "*_failures_rebuild_vs_one": "time to bring slices up, several executors lost at once / one lost",
            "*_failures_vs_one": "time to the next new output, several executors lost at once / one lost",
            "rebuild_s_failures_*": "seconds to bring slices up, by executors lost",
            "rebuild_cpu_s_failures_*": "processor seconds to bring slices up, by executors lost",
            "rebuild_s_holders_*": "seconds to bring slices up, by number of executors",
            "rebuild_s_backups_*": "seconds to bring slices up, by backups of each slice",
            "rebuild_s_*": "seconds to bring slices up, by size of state",
        },
    ),
    "replication": Section(
        (
            Table((), ("rows_s", "batch_ms_p50"), "Throughput with 0, 1 and 2 backups of each slice"),
            Table(("interval_s",), ("delta_bytes", "whole_bytes", "delta_share"), "Size of a checkpoint by interval"),
        ),
        {
            "throughput_*": "throughput with this number of backups / without",
            "lost_per_replica": "share of the throughput that a backup takes",
            "delta_share_*": "bytes of a checkpoint / bytes of the whole state, by interval",
        },
    ),
    "migrate": Section(
        (Table(("keys",), (*_DELAYS, "moved_mb"), "Time without output; `penstock_at_rest` moves nothing"),),
        {
            "vs_offline_repartition*": "delay, offline repartition of Structured Streaming / Penstock",
            "offline_repartition_s_*": "seconds of delay, Structured Streaming's offline repartition",
            "largest_vs_smallest": "delay of a live move, longest / shortest by size, from 50 MB on",
            "next_output_largest_vs_smallest": "time to the very next output, longest / shortest by size",
            "stop_largest_vs_smallest": "delay of stop and copy, longest / shortest by size, from 50 MB on",
            "unstolen_largest_vs_smallest": "delay without what the machine's host took, longest / shortest by size",
            "delay_epochs_*": "delay in epochs, live moves",
            "unstolen_epochs_max": "longest delay in epochs without what the machine's host took",
            "at_rest_epochs_max": "longest time without output while nothing moves, in epochs",
            "delay_s_*": "seconds of delay of a live move, by MB moved",
            "stop_delay_s_*": "seconds of delay of stop and copy, by MB moved",
            "vs_stop_*": "delay, stop and copy / live, by MB moved",
            "stop_s_per_gb": "seconds of delay for each GB, stop and copy",
            "stop_linear_r2": "how well a line describes the delay of stop and copy by size: 1 is exact",
        },
    ),
    "vertical": Section(
        (Table(("keys", "order"), ("moved_mb", *_DELAYS)),),
        {
            "delay_epochs_*": "delay in epochs, live",
            "delay_s_*mb": "seconds of delay, by size of state",
            "delay_s_*": "seconds of delay, by the change of cores",
            "largest_vs_smallest": "delay of a live change, longest / shortest by size",
            "stop_largest_vs_smallest": "delay of synchronous repartition, longest / shortest by size",
            "stop_delay_s_*": "seconds of delay, synchronous repartition",
            "vs_stop_*": "delay, synchronous repartition / live",
        },
    ),
    "tenant": Section(
        (Table((), ("kept", "kept_worst", "delay_s", "done_s", "moved_mb")),),
        {
            "*neighbour_kept_worst": "the database's throughput in the worst 3 s of the change / beside the steady job",
            "*neighbour_kept": "the database's throughput during the change / beside the steady job: 1 means no loss",
            "*delay_s": "seconds without output of the job itself",
            "*done_s": "seconds until the change is over",
        },
    ),
    "tide": Section(
        (Table(("part",), ("rows_s", "instances", "latency_ms_p50", "latency_ms_p99", "latency_ms_max", "memory_mb")),),
        {
            "instances_high_vs_low": "instances at the high load / at the low load",
            "instances_*": "instances at the end of the part",
            "latency_ms_*": "latency of a file in milliseconds",
            "spike_ms_*": "greatest latency in the 30 s after the load changed, in milliseconds",
            "followed_s_*": "seconds from the change of load until another number of containers gave output",
            "fixed_latency_ms_max": "greatest latency with one instance and no policy, in milliseconds",
            "worst_vs_fixed": "greatest latency, with the policy / without",
        },
    ),
    "latency": Section((Table((), ("p50_ms", "p99_ms", "max_ms")),)),
    "soak": Section(
        (),
        {
            "*_mb_per_1000": "MB that memory grows in 1,000 epochs, second half of the run",
            "*files_per_1000": "files more in 1,000 epochs",
            "epoch_ms_per_1000": "milliseconds that an epoch gets longer in 1,000 epochs",
        },
    ),
}


@dataclass(frozen=True)
class Headline:
    """One line of the README's table: Penstock beside Structured Streaming."""

    bench: str
    what: str
    figure: str
    ours: str
    theirs: str
    ratio: str
    where: Mapping[str, Any]
    ours_where: Mapping[str, Any] = field(default_factory=dict)
    """What selects Penstock's rows beside ``where``: settings that the other engine does not have."""


HEADLINES = (
    Headline(
        "words",
        "running count of words, 300,000 keys",
        "rows_s",
        "penstock",
        "structured_default",
        "vs_default_store",
        {"batch_words": 500_000},
    ),
    Headline(
        "windows",
        "top 100 words of hopping windows",
        "rows_s",
        "penstock",
        "structured_default",
        "vs_default_store",
        {"batch_words": 500_000},
    ),
    Headline(
        "custom-state",
        "state of your own, event by event (`ps.Operator`)",
        "rows_s",
        "penstock",
        "transform_with_state",
        "per_event_vs_spark",
        {"batch_words": 500_000},
    ),
    Headline(
        "custom-state",
        "state of your own, whole batches (`ps.BatchOperator`)",
        "rows_s",
        "penstock_batch",
        "transform_with_state",
        "batch_vs_spark",
        {"batch_words": 500_000},
    ),
    Headline(
        "recovery",
        "SIGKILL of one executor of five, 200 MB of state: time to new output",
        "to_next_output_s",
        "penstock",
        "structured_rocksdb",
        "vs_structured_streaming",
        {"state_mb": 200, "executors": 5, "kills": 1},
        {"backups": 1, "interval_s": 1.0},
    ),
    Headline(
        "migrate",
        "three containers to one and back, 3 million keys: time without output",
        "delay_s",
        "penstock",
        "structured_repartition",
        "vs_offline_repartition",
        {"keys": 3_000_000},
    ),
)


def headlines(results: Path = RESULTS) -> str:
    """The table of the README."""
    lines = []
    for entry in HEADLINES:
        result = json.loads((results / f"{entry.bench}.json").read_text(encoding="utf-8"))
        ours = _selected(result["rows"], entry.ours, {**entry.where, **entry.ours_where})
        theirs = _selected(result["rows"], entry.theirs, entry.where)
        lines.append(
            [
                entry.what,
                _short(_median(ours, entry.figure), entry.figure),
                _short(_median(theirs, entry.figure), entry.figure),
                f"**{_digits(result['ratios'][entry.ratio], 2):g} x**",
                f"`make bench NAME={entry.bench}`",
            ]
        )
    head = ["", "Penstock", "Structured Streaming", "ratio", "command"]
    return "\n".join([*_markdown(head, lines, left=(0, 4)), ""])


def _selected(rows: Sequence[Row], contender: str, where: Mapping[str, Any]) -> list[Row]:
    return [r for r in rows if r["contender"] == contender and all(r.get(k) == v for k, v in where.items())]


def _short(value: float | None, figure: str) -> str:
    """A figure in few characters: ``2.02 M/s``, ``12,900/s``, ``1.4 s``."""
    assert value is not None, figure
    if figure != "rows_s":
        return f"{_digits(value, 2):g} s"
    return f"{value / 1e6:.2f} M/s" if value >= 1e5 else f"{_digits(value, 3):,.0f}/s"


def _digits(value: float, significant: int) -> float:
    return float(f"{value:.{significant}g}")


def with_figures(readme: str, table: str) -> str:
    """The README with ``table`` between its two marks."""
    before, _, rest = readme.partition(_BEGIN)
    assert _END in rest, "the README has lost the marks of its figures"
    return before + _BEGIN + table + _END + rest.partition(_END)[2]


def page(results: Path = RESULTS) -> str:
    """The whole page."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.glob("*.json"))]
    known = list(SECTIONS)
    found.sort(key=lambda r: (known.index(r["bench"]) if r["bench"] in known else len(known), r["bench"]))
    contents = "\n".join(f"- [{r['bench']}](#{r['bench']}): {summary(r['bench'])}" for r in found)
    missing = [f"`{name}`" for name in known if name not in {r["bench"] for r in found}]
    without = [f"\nNo result so far: {', '.join(missing)}."] if missing else []
    return "\n".join([HEAD, contents, *without, "", *(section(r) for r in found)])


def section(result: Mapping[str, Any]) -> str:
    """What one benchmark measures, its command, where it ran, its tables and its notes."""
    name = result["bench"]
    shown = SECTIONS.get(name, Section())
    parts = [f"## {name}", "", summary(name), "", "```sh", f"make bench NAME={name}", "```", "", taken(result), ""]
    for table in shown.tables:
        parts += [*table_lines(table, result["rows"]), ""]
    parts += [*ratio_lines(shown, result["ratios"]), ""]
    parts += [f"- {note}" for note in result["notes"]]
    return "\n".join([*parts, ""])


def summary(name: str) -> str:
    """The ``SUMMARY`` of a benchmark. The module is parsed and not imported: its peers may be missing here."""
    path = ROOT / "benchmarks" / f"{name.replace('-', '_')}.py"
    if not path.exists():
        return "This benchmark is no longer in the source tree."
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "SUMMARY" for t in node.targets):
            return str(ast.literal_eval(node.value))
    return ""


def taken(result: Mapping[str, Any]) -> str:
    """With which code, when and where a result was taken: one line."""
    machine = result["machine"]
    where = f"{machine['cores']} cores, {machine['memory_gb']:g} GB"
    packages = ", ".join(f"{what} {machine[key]}" for key, what in _PACKAGES.items() if key in machine)
    return f"*{_code(result)}. {where}. {packages}.*"


def _code(result: Mapping[str, Any]) -> str:
    if about := result.get("taken"):
        changed = " with changes" if about["changed"] else ""
        rounds = f"{about['rounds']} round{'s' * (about['rounds'] != 1)}"
        return f"Version {about['version']}, commit {about['commit']}{changed}, {about['date']}. {rounds}"
    if kept := result.get("recorded"):
        return f"Committed on {kept['date']} with {kept['commit']}; the commit that ran was not recorded"
    return "Version 0.1.0, date unknown"


_PACKAGES = {"python": "Python", "java": "Java", "pyspark": "PySpark", "polars": "polars", "pyarrow": "pyarrow"}


def table_lines(table: Table, rows: Sequence[Row]) -> Iterator[str]:
    """One line for each contender and group; nothing when no row belongs in the table."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row.get(table.figures[0]) is not None:
            groups.setdefault((row["contender"], *(row.get(by) for by in table.by)), []).append(row)
    if not groups:
        return
    if table.title:
        yield f"**{table.title}**"
        yield ""
    yield from _markdown(
        ["contender", *(_spoken(name) for name in (*table.by, *table.figures)), "runs"],
        [
            [
                f"`{key[0]}`",
                *(number(value) for value in key[1:]),
                *(number(_median(group, figure)) for figure in table.figures),
                str(len(group)),
            ]
            for key, group in groups.items()
        ],
    )


def _median(rows: Sequence[Row], figure: str) -> float | None:
    """Four significant digits: more would pretend to know them. None: no row has the figure."""
    values = [float(row[figure]) for row in rows if row.get(figure) is not None]
    return _digits(statistics.median(values), 4) if values else None


def ratio_lines(shown: Section, ratios: Mapping[str, float]) -> Iterator[str]:
    """Every ratio of a result. Ratios that mean the same share a line."""
    lines: dict[str, list[str]] = {}
    for name, value in ratios.items():
        lines.setdefault(meaning(shown, name), []).append(f"`{name}` {number(value)}")
    if lines:
        rows = [[text, ", ".join(figures)] for text, figures in lines.items()]
        yield from _markdown(["what", "figures"], rows, left=(0, 1))


def meaning(shown: Section, name: str) -> str:
    """What a ratio means; nothing for the ratio of a benchmark that ``SECTIONS`` does not know."""
    return next((text for pattern, text in shown.ratios.items() if fnmatchcase(name, pattern)), "")


def number(value: Any) -> str:
    """A figure as people write it: thousands with commas, four significant digits of what is no whole number."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _spoken(name: str) -> str:
    """``batch_ms_p50`` -> "batch p50, ms": the unit last."""
    if match := re.fullmatch(r"(\w+?)_(ms|s|mb|bytes)(?:_(\w+))?", name):
        what, unit, rest = match.groups()
        if what == "rows":
            return "rows a second"
        shown = f"{what} {rest}" if rest else what
        return f"{shown.replace('_', ' ')}, {'MB' if unit == 'mb' else unit}"
    return name.replace("_", " ")


def _markdown(head: Sequence[str], lines: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> Iterator[str]:
    yield "| " + " | ".join(head) + " |"
    yield "|" + "|".join(" --- " if column in left else " ---: " for column in range(len(head))) + "|"
    for line in lines:
        yield "| " + " | ".join(line) + " |"


def main() -> None:
    """Write the page, and the figures of the README."""
    PAGE.write_text(page(), encoding="utf-8")
    README.write_text(with_figures(README.read_text(encoding="utf-8"), headlines()), encoding="utf-8")
    print(f"written: {PAGE.relative_to(ROOT)} and the figures of {README.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
