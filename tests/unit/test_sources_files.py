"""Files as a source: any cut of any range gives the same rows, and what cannot be a row is told, not lost."""

from __future__ import annotations

import csv
import datetime as dt
import errno
import gzip
import io
import json
import os
import pickle
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

from penstock.connectors import SourceContext, bad_records_frame, files, lines, polars_schema
from penstock.connectors.base import BadRecord, Source
from penstock.connectors.lines import CsvCuts, record_ends
from penstock.connectors.rows import _uniform_datetimes
from penstock.connectors.storage import Storage
from penstock.errors import FlowError, SourceError

CONTEXT = SourceContext("in", None)


def opened(*args: Any, **options: Any) -> Any:
    source = files(*args, **options)
    source.open(CONTEXT)
    return source


def read_range(source: Source, start: Any, end: Any, parallelism: int) -> tuple[pl.DataFrame, list[BadRecord]]:
    worker = pickle.loads(pickle.dumps(source))
    splits = json.loads(json.dumps(source.splits(start, end, parallelism)))
    assert 1 <= len(splits) <= parallelism
    results = [worker.read("in", split) for split in splits]
    for result in results:
        assert result.frame.schema == source.schema()
    return pl.concat([r.frame for r in results]), [b for r in results for b in r.bad]


def drain(source: Source, rows_max: int, parallelism: int) -> tuple[pl.DataFrame, list[BadRecord], int]:
    frames, bad, ranges = [pl.DataFrame(schema=source.schema())], [], 0
    at = source.initial_offset()
    while (planned := source.plan(at, rows_max)) is not None:
        assert planned.start == at and planned.end != at
        frame, failed = read_range(source, planned.start, planned.end, parallelism)
        frames.append(frame)
        bad.extend(failed)
        at, ranges = planned.end, ranges + 1
    return pl.concat(frames), bad, ranges


# ------------------------------------------------------------ any cut gives the same rows

FORMATS = ("text", "csv", "jsonl", "parquet")


def write_files(folder: Path, format: str, sizes: list[int], gz: bool) -> pl.DataFrame:
    folder.mkdir(parents=True, exist_ok=True)
    frames, first = [], 0
    for i, size in enumerate(sizes):
        frame = pl.DataFrame(
            {"n": range(first, first + size), "word": [f"wörd {'x' * (k % 17)}" for k in range(size)]},
            schema={"n": pl.Int64, "word": pl.String},
        )
        path = folder / f"{i:03}.{format}"
        if format == "parquet":
            frame.write_parquet(path, row_group_size=7)
        else:
            lines = {
                "text": [f"{n} {w}" for n, w in frame.rows()],
                "csv": ["n,word", *(f'{n},"{w}"' if n % 3 else f"{n},{w}" for n, w in frame.rows())],
                "jsonl": [json.dumps({"n": n, "word": w}) for n, w in frame.rows()],
            }[format]
            # Every second file ends without a line end.
            data = ("\n".join(lines) + ("\n" if i % 2 and lines else "")).encode()
            if gz and i % 2:
                path.with_suffix(path.suffix + ".gz").write_bytes(gzip.compress(data, mtime=0))
            else:
                path.write_bytes(data)
        frames.append(frame)
        first += size
    whole = pl.concat(frames)
    return (
        whole.select((pl.col("n").cast(pl.String) + " " + pl.col("word")).alias("line")) if format == "text" else whole
    )


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    format=st.sampled_from(FORMATS),
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=5),
    gz=st.booleans(),
    rows_max=st.integers(1, 60),
    parallelism=st.integers(1, 7),
    follow=st.booleans(),
)
def test_every_cut_gives_the_whole(
    tmp_path_factory: pytest.TempPathFactory,
    format: str,
    sizes: list[int],
    gz: bool,
    rows_max: int,
    parallelism: int,
    follow: bool,
) -> None:
    folder = tmp_path_factory.mktemp("in")
    whole = write_files(folder, format, sizes, gz)
    schema = None if format == "text" else {"n": int, "word": str}
    source = opened(folder, format=format, schema=schema, follow=follow)
    frame, bad, _ = drain(source, rows_max, parallelism)
    assert not bad
    assert_frame_equal(frame, whole)


@pytest.mark.parametrize("format", FORMATS)
def test_ranges_are_about_as_large_as_asked(tmp_path: Path, format: str) -> None:
    whole = write_files(tmp_path, format, [300, 300, 300], gz=False)
    frame, _, ranges = drain(opened(tmp_path), 100, 2)
    assert_frame_equal(frame, whole)
    assert ranges == 9, "100 rows are asked for, and 900 are there"


def test_splits_are_balanced(tmp_path: Path) -> None:
    whole = write_files(tmp_path, "parquet", [10, 1000, 10], gz=False)
    source = opened(tmp_path)
    planned = source.plan(source.initial_offset(), whole.height)
    sizes = [source.read("in", s).frame.height for s in source.splits(planned.start, planned.end, 4)]
    assert sizes == [255, 255, 255, 255]


def test_many_cuts_in_one_long_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 200_000 + "\nshort\n")
    frame, _, _ = drain(opened(tmp_path / "a.txt"), 10, 5)
    assert frame["line"].str.len_chars().to_list() == [200_000, 5]


# ------------------------------------------------------------ discovery, restart, change


def test_a_directory_that_grows(tmp_path: Path) -> None:
    source = opened(tmp_path, format="text", follow=True)
    at = source.initial_offset()
    assert source.plan(at, 100) is None
    assert not source.exhausted(at)
    seen: list[str] = []
    for name in ("b", "a", "c"):  # discovered in this order, so read in this order
        (tmp_path / f"{name}.txt").write_text(f"{name}1\n{name}2\n")
        for ignored in ("_x.txt", ".x.txt", "x.txt.tmp"):
            (tmp_path / ignored).write_text("no\n")
        planned = source.plan(at, 100)
        assert [f["path"] for f in planned.facts] == [str(tmp_path / f"{name}.txt")]
        seen += read_range(source, planned.start, planned.end, 2)[0]["line"].to_list()
        at = planned.end
        assert source.plan(at, 100) is None
    assert seen == ["b1", "b2", "a1", "a2", "c1", "c2"]
    assert not source.exhausted(at)


@pytest.mark.parametrize("pattern", ["", "*", "**/*.txt"], ids=["a directory", "a glob", "a deep glob"])
def test_who_follows_looks_once_at_each_file(tmp_path: Path, pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory that fills for days is listed many times a second."""
    looked: list[str] = []
    stat = os.stat

    def counted(path: Any, *args: Any, **options: Any) -> os.stat_result:
        looked.append(os.path.basename(path))
        return stat(path, *args, **options)

    monkeypatch.setattr(os, "stat", counted)
    source = opened(tmp_path / pattern, format="text", follow=True)
    at = source.initial_offset()
    for number in range(5):
        (tmp_path / f"{number}.txt").write_text("a\n")
        planned = source.plan(at, 100)
        assert planned is not None
        at = planned.end
        looked.clear()
        assert source.plan(at, 100) is None
        assert not {f"{n}.txt" for n in range(5)} & set(looked)
    assert at["file"] == 5


def test_a_store_is_not_asked_all_the_time_for_new_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, asked = [0.0], []
    list_remote = Storage._list_remote

    def slow(storage: Storage, pattern: str) -> Any:
        asked.append(now[0])
        now[0] += 0.2
        return list_remote(storage, pattern)

    monkeypatch.setattr(Storage, "_list_remote", slow)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    source = opened(f"memory://looked-{tmp_path.name}", format="text", follow=True)
    while now[0] < 10:
        assert source.plan(source.initial_offset(), 100) is None
        now[0] += 0.02
    assert len(asked) == 5 and 1.99 < asked[1] - asked[0] < 2.1


@pytest.mark.parametrize("follow", [True, False])
def test_a_restart_reads_logged_ranges_again(tmp_path: Path, follow: bool) -> None:
    write_files(tmp_path, "csv", [20, 20], gz=False)
    first = opened(tmp_path, follow=follow)
    at, log, frames = first.initial_offset(), [], []
    for _ in range(3):
        planned = first.plan(at, 8)
        assert planned == first.plan(at, 8), "to plan twice changes nothing"
        log.append(planned)
        frames.append(read_range(first, planned.start, planned.end, 2)[0])
        at = planned.end
    # A file that sorts before all others comes between the two runs.
    (tmp_path / "!early.csv").write_text("n,word\n-1,early\n")

    second = opened(tmp_path, follow=follow)
    second.remember(json.loads(json.dumps([f for planned in log for f in planned.facts])))
    for planned, frame in zip(log, frames, strict=True):
        assert_frame_equal(read_range(second, planned.start, planned.end, 3)[0], frame)
    rest: list[int] = []
    while (planned := second.plan(at, 100)) is not None:
        rest += read_range(second, planned.start, planned.end, 1)[0]["n"].to_list()
        at = planned.end
    done = sum(f.height for f in frames)
    assert sorted(rest) == ([-1] if follow else []) + list(range(done, 40))
    assert second.exhausted(at) is not follow


def test_it_ends(tmp_path: Path) -> None:
    write_files(tmp_path, "text", [3, 0], gz=False)  # the last file is empty
    source = opened(tmp_path)
    assert not source.exhausted(source.initial_offset())
    planned = source.plan(source.initial_offset(), 100)
    assert source.exhausted(planned.end)
    assert source.plan(planned.end, 100) is None


def test_no_match(tmp_path: Path) -> None:
    source = opened(str(tmp_path / "*.txt"))
    with pytest.raises(SourceError, match=r"No file matches .*follow=True"):
        source.plan(source.initial_offset(), 10)
    with pytest.raises(SourceError, match=r"columns are unknown.*schema="):
        files(str(tmp_path / "*.csv"), follow=True).schema()


@pytest.mark.parametrize("format", ["text", "parquet"])
def test_a_file_that_changed_or_went(tmp_path: Path, format: str) -> None:
    write_files(tmp_path, format, [10], gz=False)
    source = opened(tmp_path)
    planned = source.plan(source.initial_offset(), 100)
    [split] = source.splits(planned.start, planned.end, 1)
    path = tmp_path / f"000.{format}"
    with path.open("ab") as file:
        file.write(b"more\n")
    with pytest.raises(SourceError, match="must not change") as changed:
        source.read("in", split)
    assert changed.value.evidence["path"] == str(path) and changed.value.remedy
    path.unlink()
    with pytest.raises(SourceError, match="is gone"):
        source.read("in", split)


def test_workers_get_no_catalogue(tmp_path: Path) -> None:
    for i in range(200):
        (tmp_path / f"{i}.txt").write_text("x\n")
    source = opened(tmp_path)
    source.plan(source.initial_offset(), 10)
    assert len(pickle.dumps(source)) < 2000


def test_relative_paths_and_several_patterns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(tmp_path / "a", "text", [2], gz=False)
    write_files(tmp_path / "b" / "deep", "text", [2], gz=False)
    monkeypatch.chdir(tmp_path)
    source = opened(["a/*.text", "b"], path=True)
    monkeypatch.chdir("/")
    frame, _, _ = drain(source, 100, 1)
    assert frame.columns == ["line", "path"]
    assert frame["path"].unique(maintain_order=True).to_list() == [
        str(tmp_path / "a/000.text"),
        str(tmp_path / "b/deep/000.text"),
    ]


def test_an_fsspec_address(tmp_path: Path) -> None:
    import fsspec

    fs = fsspec.filesystem("memory")
    frame = pl.DataFrame({"n": range(50), "word": [str(i) for i in range(50)]})
    for name, part in (("a", frame[:30]), ("b", frame[30:])):
        with fs.open(f"/in-{tmp_path.name}/{name}.parquet", "wb") as out:
            part.write_parquet(out, row_group_size=7)
        fs.pipe_file(f"/in-{tmp_path.name}/{name}.csv", part.write_csv().encode())
    fs.pipe_file(f"/in-{tmp_path.name}/_no.csv", b"no")
    for pattern in ("*.parquet", "*.csv"):
        read, bad, _ = drain(opened(f"memory://in-{tmp_path.name}/{pattern}", schema={"n": int, "word": str}), 11, 3)
        assert not bad
        assert_frame_equal(read, frame)


# ------------------------------------------------------------ bad records


def test_bad_csv(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    lines = [
        b"n,word,at",
        b"1,a,2024-01-01T00:00:01Z",
        b"x,b,2024-01-01",
        b"3,c",
        b"4,d,2024-01-01 00:00:04.5,extra",
        b"",
        b'5,"e,""f""",',
        b'6,"g"h,2024-01-01',
        b'7,"open,2024-01-01',
        b"8,\xff,2024-01-01",
        b" 9 , i,tomorrow",
        b"10,,2024-01-01 10:11",
    ]
    path.write_bytes(b"\r\n".join(lines))
    schema = {"at": pl.Datetime("us"), "n": pl.Int32, "word": str}  # in another order than in the file
    for parallelism in (1, 2, 5, 12):
        frame, bad, _ = drain(opened(path, schema=schema, multiline=False), 1000, parallelism)
        assert frame.rows() == [
            (dt.datetime(2024, 1, 1, 0, 0, 1), 1, "a"),
            (None, 5, 'e,"f"'),
            (dt.datetime(2024, 1, 1, 10, 11), 10, None),
        ]
        offsets = [sum(len(line) + 2 for line in lines[:i]) for i in (2, 3, 4, 7, 8, 9, 10)]
        assert [b.offset for b in bad] == [f"{path}:{at}" for at in offsets]
        assert [b.reason for b in bad] == [
            "column 'n': 'x' is not a Int32",
            "2 fields, expected 3",
            "4 fields, expected 3",
            "misplaced quotes",
            "misplaced quotes",
            "not UTF-8 (byte 2 of the line)",
            "column 'at': 'tomorrow' is not a Datetime(time_unit='us', time_zone=None)",
        ]
        assert bad[0].raw == "x,b,2024-01-01" and {b.source for b in bad} == {"in"}


def test_bad_jsonl(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    lines = [
        b'{"n": 1, "at": "2024-01-01T00:00:01", "extra": 5}',
        b"[1]",
        b'{"n": "2"}',
        b'{"n": 3',
        b'{"n": 1.5}',
        b"  ",
        b'{"n": null, "word": "x"}',
        b'{"word": "\xff"}',
        b'{"n": 4, "at": "soon"}',
        b'{"n": 5}{"n": 6}',
        b'{"word": "last"}',
    ]
    path.write_bytes(b"\n".join(lines))
    for parallelism in (1, 3, 11):
        source = opened(path, schema={"n": int, "word": str, "at": dt.datetime})
        frame, bad, _ = drain(source, 1000, parallelism)
        assert frame.rows() == [
            (1, None, dt.datetime(2024, 1, 1, 0, 0, 1)),
            (None, "x", None),
            (None, "last", None),
        ]
        at = [sum(len(line) + 1 for line in lines[:i]) for i in (1, 2, 3, 4, 7, 8, 9)]
        assert [b.offset for b in bad] == [f"{path}:{a}" for a in at]
        assert bad[0].reason.startswith("not a JSON object")
        assert all(b.reason for b in bad)


def test_bad_text(tmp_path: Path) -> None:
    path = tmp_path / "in.txt"
    path.write_bytes(b"\xef\xbb\xbfgood\n\nb\xc3\nlast \xc3\xa9")
    frame, bad, _ = drain(opened(path), 100, 2)
    assert frame["line"].to_list() == ["good", "", "last é"]
    assert [(b.offset, b.raw) for b in bad] == [(f"{path}:9", "b\ufffd")]
    assert bad_records_frame(bad).rows() == [("in", f"{path}:9", "not UTF-8 (byte 1 of the line)", "b\ufffd")]
    assert bad_records_frame([]).columns == ["source", "offset", "reason", "raw"]


def test_raw_is_clipped(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("x" * 5000 + "\n")
    _, [bad], _ = drain(opened(path, schema={"n": int}), 10, 1)
    assert len(bad.raw) == 500


CSV_LINES = [b"1,a", b"2,b", b"x,c", b"3", b"4,d,e", b'5,"f"', b'"', b'6,"g""', b"\xff,1", b"", b",", b'"7",']
JSON_LINES = [
    b'{"n": 1}',
    b'{"n": 2, "word": "b"}',
    b'{"n": "3"}',
    b"[1]",
    b'{"n"',
    b"",
    b"\xff",
    b'{"word": 4}',
    b'{"n": 1}{',
]


@settings(max_examples=60, deadline=None)
@given(
    format_lines=st.one_of(
        st.tuples(st.just("csv"), st.lists(st.sampled_from(CSV_LINES), max_size=30)),
        st.tuples(st.just("jsonl"), st.lists(st.sampled_from(JSON_LINES), max_size=30)),
    ),
    parallelism=st.integers(2, 6),
)
def test_the_fate_of_a_line_does_not_depend_on_the_split(
    tmp_path_factory: pytest.TempPathFactory, format_lines: tuple[str, list[bytes]], parallelism: int
) -> None:
    format, given = format_lines
    path = tmp_path_factory.mktemp("in") / f"in.{format}"
    path.write_bytes((b"n,word\n" if format == "csv" else b"") + b"\n".join(given))
    schema = {"n": int, "word": str}
    for multiline in (False, True):
        one, one_bad, _ = drain(opened(path, schema=schema, multiline=multiline), 10_000, 1)
        many, many_bad, _ = drain(opened(path, schema=schema, multiline=multiline), 3, parallelism)
        assert_frame_equal(one, many)
        assert one_bad == many_bad
        if format == "jsonl" or not multiline:  # otherwise a quote may make one record of several lines
            assert one.height + len(one_bad) == sum(1 for line in given if line)


# ------------------------------------------------------------ CSV by the rules

FIELDS = st.text(alphabet=st.sampled_from(list('a1",;\n\r \té\u2028\x00')), max_size=8)


def csv_rows(data: bytes, separator: str = ",") -> list[list[str]]:
    """What Python's own csv module reads."""
    return [r for r in csv.reader(io.StringIO(data.decode(), newline=""), delimiter=separator) if r]


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(FIELDS, FIELDS, FIELDS), min_size=1, max_size=12),
    quoting=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC]),
    end=st.sampled_from(["\r\n", "\n"]),
    separator=st.sampled_from([",", ";", "\t"]),
    bom=st.booleans(),
    last_end=st.booleans(),
)
def test_csv_is_read_as_the_csv_module_reads_it_at_every_split(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[tuple[str, str, str]],
    quoting: Any,
    end: str,
    separator: str,
    bom: bool,
    last_end: bool,
) -> None:
    if quoting == csv.QUOTE_MINIMAL and end == "\n":
        rows = [(a.replace("\r", ""), b.replace("\r", ""), c.replace("\r", "")) for a, b, c in rows]  # not quoted
    out = io.StringIO(newline="")
    writer = csv.writer(out, delimiter=separator, quoting=quoting, lineterminator=end)
    writer.writerow(['a "1"', "b\n2", "c"])
    writer.writerows(rows)
    text = out.getvalue() if last_end else out.getvalue().removesuffix(end)
    data = text.encode()
    path = tmp_path_factory.mktemp("in") / "in.csv"
    path.write_bytes((b"\xef\xbb\xbf" if bom else b"") + data)
    expected = csv_rows(data, separator)[1:]
    schema = {'a "1"': str, "b\n2": str, "c": str}
    for rows_max in (1, 4, 100):
        for parallelism in (1, 100) if rows_max > 1 else (2,):
            source = opened(path, schema=schema, separator=separator)
            frame, bad, _ = drain(source, rows_max, parallelism)
            assert not bad
            assert [[field or "" for field in row] for row in frame.rows()] == expected


@settings(max_examples=300, deadline=None)
@given(data=st.text(alphabet=st.sampled_from(list('a",\n')), max_size=40), block=st.integers(1, 9))
def test_ends_of_csv_records_by_counting_and_by_walking(data: str, block: int) -> None:
    """Also where quotes are misplaced, and however small the blocks are."""
    raw = data.encode()
    walked = lines._ends_one_by_one(raw, b",").tolist()
    assert record_ends(raw, ",").tolist() == walked
    ends = walked if not raw[walked[-1] if walked else 0 :] else [*walked, len(raw)]
    records = [csv_rows(raw[a:b]) for a, b in pairwise([0, *ends])]
    assert [r for part in records for r in part] == csv_rows(raw)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "BLOCK_BYTES", block)
        assert record_ends(raw, ",").tolist() == walked
        cuts = CsvCuts(lambda a, b: raw[a:b], ",")
        for wanted in (*range(len(raw) + 1), *range(len(raw) + 1)):  # the second time from what it knows by then
            expected = next((end for end in [0, *walked] if end >= wanted), len(raw))
            assert cuts.first_from(wanted, len(raw)) == expected


def test_a_quoted_line_break_makes_no_row_up(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_text('n,word\n1,a\n6,"x\n7,evil\ny"\n8,b\n')
    for parallelism in (1, 2, 3, 9):
        frame, bad, _ = drain(opened(path, schema={"n": int, "word": str}), 1, parallelism)
        assert not bad and frame.rows() == [(1, "a"), (6, "x\n7,evil\ny"), (8, "b")]


def test_a_quote_that_is_never_closed_is_one_dead_letter(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_text('n,word\n1,a\n6,"x\n7,evil\n8,b\n')
    frame, [bad], _ = drain(opened(path, schema={"n": int, "word": str}), 1, 3)
    assert frame.rows() == [(1, "a")]
    assert (bad.offset, bad.reason, bad.raw) == (f"{path}:11", "misplaced quotes", '6,"x\n7,evil\n8,b')


def test_each_byte_of_a_big_csv_file_is_scanned_about_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "in.csv"
    path.write_text("n,word\n" + "".join(f'{i},"a\n{i}"\n' for i in range(200_000)))
    monkeypatch.setattr(lines, "BLOCK_BYTES", 1 << 13)
    source = opened(path, schema={"n": int, "word": str})
    scanned = []
    read = Storage.read

    def counted(storage: Storage, path: str, first: int, last: int | None) -> bytes:
        scanned.append((last or 0) - first)
        return read(storage, path, first, last)

    monkeypatch.setattr(Storage, "read", counted)
    at = source.initial_offset()
    while (planned := source.plan(at, 10_000)) is not None:
        at = planned.end
    assert sum(scanned) < 1.5 * path.stat().st_size


def test_a_parquet_file_of_another_shape(tmp_path: Path) -> None:
    pl.DataFrame({"n": [1], "word": ["a"]}).write_parquet(tmp_path / "a.parquet")
    source = opened(tmp_path)
    at = source.plan(source.initial_offset(), 1).end
    for frame, message in (
        (pl.DataFrame({"n": [1]}), "no column 'word'"),
        (pl.DataFrame({"n": ["1"], "word": ["a"]}), "column 'n' is a String, not a Int64"),
    ):
        frame.write_parquet(tmp_path / "b.parquet")
        other = opened(tmp_path, schema=source.schema())
        with pytest.raises(SourceError, match=message) as caught:
            other.plan(at, 1)
        assert str(tmp_path / "b.parquet") in str(caught.value) and caught.value.remedy


def test_a_damaged_file(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 this is none")
    with pytest.raises(SourceError, match=r"a\.parquet cannot be read"):
        files(tmp_path / "a.parquet").schema()
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"x\n" * 1000)[:-9])
    source = opened(tmp_path / "a.txt.gz")
    with pytest.raises(SourceError, match=r"a\.txt\.gz cannot be read"):
        drain(source, 10, 1)


# ------------------------------------------------------------ schemas


def test_inferred_schemas(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(
        "i,f,s,b,d,t,e\n1,1.5,x,true,2024-01-01,2024-01-01 10:00:00,\n2,3,1x,False,,2024-01-02,\n"
    )
    assert files(tmp_path / "a.csv").schema() == pl.Schema(
        {
            "i": pl.Int64(),
            "f": pl.Float64(),
            "s": pl.String(),
            "b": pl.Boolean(),
            "d": pl.Date(),
            "t": pl.Datetime("us"),
            "e": pl.String(),
        }
    )
    (tmp_path / "a.jsonl").write_text('nonsense\n{"n": 1, "x": null}\n{"n": 2.5, "l": ["a"]}\n')
    assert files(tmp_path / "a.jsonl").schema() == pl.Schema(
        {"n": pl.Float64(), "x": pl.String(), "l": pl.List(pl.String())}
    )
    (tmp_path / "b.tsv").write_text("1\tx\n")
    assert files(tmp_path / "b.tsv", header=False).schema() == pl.Schema(
        {"column_1": pl.Int64(), "column_2": pl.String()}
    )


def test_csv_headers(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("n,word\n1,a\n")
    (tmp_path / "b.csv").write_text("word,more,n\nb,x,2\n")  # by name, not by place
    frame, _, _ = drain(opened(tmp_path, schema={"n": int, "word": str}), 100, 1)
    assert frame.rows() == [(1, "a"), (2, "b")]
    (tmp_path / "c.csv").write_text("n\n3\n")
    with pytest.raises(SourceError, match=r"c\.csv: the header has no column 'word'"):
        drain(opened(tmp_path, schema={"n": int, "word": str}), 100, 1)
    (tmp_path / "d.csv").write_text("1;a\n")
    source = opened(tmp_path / "d.csv", schema={"n": int, "word": str}, header=False, separator=";")
    assert drain(source, 100, 1)[0].rows() == [(1, "a")]


def test_polars_schema() -> None:
    schema = polars_schema({"a": int, "b": pl.Int8, "c": pl.Datetime("ms"), "d": dt.datetime, "e": list[str]})
    assert schema == pl.Schema(
        {"a": pl.Int64(), "b": pl.Int8(), "c": pl.Datetime("ms"), "d": pl.Datetime("us"), "e": pl.List(pl.String())}
    )
    assert polars_schema(schema) == schema
    for wrong, message in (
        ({"a": "int"}, "Column 'a': 'int' is not a type"),
        ({"a": pl.List}, "needs arguments"),
        ({}, "at least one column"),
        (["a"], "must map column names"),
        ({1: int}, "column name"),
    ):
        with pytest.raises(FlowError, match=message) as caught:
            polars_schema(wrong)  # type: ignore[arg-type]
        assert caught.value.remedy


def test_wrong_arguments(tmp_path: Path) -> None:
    for arguments, message in (
        ({"format": "xml"}, "not a file format"),
        ({}, "format of .* cannot be told"),
        ({"format": "csv", "separator": "ab"}, "cannot separate"),
        ({"format": "csv", "schema": {"a": list[int]}}, "CSV field cannot be"),
        ({"format": "text", "schema": {"a": int}}, "one column"),
    ):
        with pytest.raises(FlowError, match=message):
            files(tmp_path, **arguments)
    with pytest.raises(FlowError, match="empty list"):
        files([])


def test_timezones(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_text("t\n2024-01-01T02:00:00+02:00\n2024-01-01 00:00:00Z\n2024-01-01\n")
    frame, bad, _ = drain(opened(path, schema={"t": pl.Datetime("us", "UTC")}), 100, 1)
    assert not bad
    assert frame["t"].to_list() == [dt.datetime(2024, 1, 1, tzinfo=dt.UTC)] * 3


def test_a_file_we_may_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "in.txt"
    path.write_text("x\n")

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Storage, "open", refuse)  # the tests may run as root, who may read everything
    with pytest.raises(SourceError, match="right to read"):
        drain(opened(path), 10, 1)


@given(
    st.lists(
        st.one_of(
            st.datetimes(dt.datetime(1, 1, 1), dt.datetime(9999, 12, 31)).map(str),
            st.from_regex(r"\A(19|20)[0-9]{2}-[01][0-9]-[0-3][0-9] [0-2][0-9]:[0-6][0-9]:[0-6][0-9](\.[0-9]{3})?\Z"),
        ),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from(["us", "ms"]),
)
def test_the_fast_datetime_parser_agrees_with_the_general_one(texts: list[str], unit: Any) -> None:
    text = pl.Series("t", texts)
    fast = _uniform_datetimes(text, unit)
    zulu = _uniform_datetimes(text.str.replace(" ", "T") + "Z", unit)
    assert (zulu is None and fast is None) or (fast is not None and zulu is not None and zulu.equals(fast))
    general = text.str.to_datetime("%Y-%m-%d %H:%M:%S%.f", time_unit=unit, strict=False)
    if fast is not None:
        assert fast.to_list() == general.to_list()
    elif len({len(t) for t in texts}) == 1 and len(texts[0]) in (19, 23, 26):
        # Given up only for what is no date, or for a leap second.
        assert general.null_count() or any(t[17:19] == "60" for t in texts)


def test_the_fast_datetime_parser_is_used() -> None:
    many = pl.Series(["2024-02-29 01:02:03.000456"] * 3)
    assert _uniform_datetimes(many, "us") is not None
    assert _uniform_datetimes(many[1:], "us") is not None
    for odd in ("2023-02-29 01:02:03.000456", "2024-02-29 24:02:03.000456", "2024-02-29 01:02:03.00045x"):
        assert _uniform_datetimes(pl.Series([odd]), "us") is None
