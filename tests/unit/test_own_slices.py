"""Stages with numbers of slices of their own: rescaled, restarted, and read from checkpoints of the version before."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import xxhash
from polars.testing import assert_frame_equal

import penstock as ps
from penstock import testing
from penstock.engines.job import Job, start
from penstock.errors import ConfigError, FlowError, IncompatibleFlow
from penstock.ids import StageId
from penstock.state.checkpoint import Manifest
from penstock.state.codec import decode_header
from penstock.state.slicemap import SLICES_MAX

FIRST, SECOND = StageId("sums"), StageId("ranks")
EPOCHS = 12
ROWS = pl.DataFrame(
    {"k": [f"k{i * i % 97}" for i in range(100 * EPOCHS)], "x": [float(i % 13) / 10 for i in range(100 * EPOCHS)]}
)


def flow(place: Path, first: int | None, second: int | None) -> ps.Flow:
    made = ps.Flow("own")
    rows = made.source("in", testing.rows(ROWS, epochs=[100] * EPOCHS))
    sums = rows.key_by("k", slices=first).aggregate("sums", n=ps.count(), x=ps.sum("x"))
    sums.sink("out", ps.parquet(str(place / "sums")))
    changes = rows.hash_partition("x", 2, uid="by-x", slices=second)
    changes.aggregate("ranks", n=ps.count(), most=ps.max("k")).sink("ranked", ps.parquet(str(place / "ranks")))
    return made


def run(made: ps.Flow, at: dict[int, Callable[[Job], None]] | None = None, **settings: Any) -> Job:
    """Run it; after so many epochs do something to the job."""
    held: list[Job] = []
    ready = threading.Event()
    published = 0

    def trip(step: str) -> None:
        nonlocal published
        if step == "after-publish":
            published += 1
            ready.wait()
            if at and published in at:
                at[published](held[0])

    config = ps.Config(**{"instances": 2, "control": False, "checkpoint_interval_s": 0.0, **settings})
    held.append(job := start(made, engine="local", config=config, trip=trip))
    ready.set()
    assert job.wait(240), "it hangs"
    return job


def output(place: Path) -> dict[str, pl.DataFrame]:
    found = {name: ps.read_output(place / name) for name in ("sums", "ranks")}
    return {name: frame.sort(frame.columns) for name, frame in found.items()}


def same(found: dict[str, pl.DataFrame], expected: dict[str, pl.DataFrame]) -> None:
    for name, frame in expected.items():
        assert_frame_equal(found[name], frame)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pl.DataFrame]:
    """The oracle: one container, one slice, nothing in its way."""
    place = tmp_path_factory.mktemp("oracle")
    run(flow(place, None, None), instances=1, slices=1)
    return output(place)


def counts_of(job: Job) -> dict[StageId, int]:
    routing = job.routing
    assert routing is not None
    assert {s: len(o) for s, o in routing.owners.items()} == {s: m.count for s, m in routing.slicemaps.items()}
    return {stage: slicemap.count for stage, slicemap in routing.slicemaps.items()}


def test_eight_slices_in_one_stage_and_64_in_another(tmp_path: Path, expected: dict[str, pl.DataFrame]) -> None:
    """Rescaled while it runs, stopped, and started anew with other instances."""

    def rescale(first: int, second: int) -> Callable[[Job], None]:
        def both(job: Job) -> None:
            job.rescale("sums", first)
            job.rescale("by-x", second)

        return both

    store = tmp_path / "ck"
    settings: dict[str, Any] = {"checkpoint": str(store), "slices": 16}
    job = run(flow(tmp_path, 8, 64), {2: rescale(8, 20), 4: rescale(3, 5)}, epochs_max=6, **settings)
    assert counts_of(job) == {FIRST: 8, SECOND: 64}
    assert job.status().epoch == 6 and job.status().routing_version > 1
    again = run(flow(tmp_path, 8, 64), {2: rescale(1, 30)}, **{**settings, "instances": 4})
    assert again.status().phase == "complete" and counts_of(again) == {FIRST: 8, SECOND: 64}
    assert not any("ignored" in notice for notice in again.notices)
    same(output(tmp_path), expected)
    headers = [decode_header(path.read_bytes(), "") for path in store.glob("state/**/*") if path.is_file()]
    assert {(h["stage"], h["slices_total"]) for h in headers} == {("sums", 8), ("ranks", 64)}
    newest = max(store.glob("manifests/*"))
    assert Manifest.from_bytes(newest.read_bytes()).routing["slices"] == {"sums": 8, "ranks": 64}


def test_a_stage_cannot_have_more_instances_than_slices(tmp_path: Path) -> None:
    refused: list[ConfigError] = []

    def too_many(job: Job) -> None:
        with pytest.raises(ConfigError, match="stage 'sums' cannot have 9 instances: it has only 8 slices") as error:
            job.rescale("sums", 9)
        refused.append(error.value)
        with pytest.raises(ConfigError, match="there is no slice 8 in stage 'sums'"):
            job.migrate("sums", [8], 0)

    job = run(flow(tmp_path, 8, 64), {1: too_many}, instances=20)
    assert refused and refused[0].remedy
    assert {s.id: s.instances for s in job.status().stages} == {"in": 20, "sums": 8, "ranks": 2}
    assert job.status().slices == 64


@pytest.mark.parametrize(("first", "says"), [(16, "slices=16"), (4, "slices=4")])
def test_the_number_of_a_stage_is_set_at_its_first_run(first: int, says: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"checkpoint": str(tmp_path / "ck")}
    run(flow(tmp_path, 8, 64), epochs_max=3, **settings)
    with pytest.raises(IncompatibleFlow, match=f"stage 'sums' has 8 slices.*the flow says {says}") as error:
        run(flow(tmp_path, first, 64), **settings)
    assert error.value.remedy.startswith("Write slices=8,")


def test_a_number_that_the_flow_no_longer_says_stays(tmp_path: Path, expected: dict[str, pl.DataFrame]) -> None:
    settings: dict[str, Any] = {"checkpoint": str(tmp_path / "ck"), "slices": 16}
    run(flow(tmp_path, 8, 64), epochs_max=3, **settings)
    job = run(flow(tmp_path, None, 64), **settings)
    assert counts_of(job) == {FIRST: 8, SECOND: 64}
    ignored = [notice for notice in job.notices if "ignored" in notice]
    assert ignored == ["the state of 'sums' has 8 slices, set at its first run; slices=16 is ignored."]
    same(output(tmp_path), expected)


def as_before(store: Path, slices: int) -> None:
    """Write a checkpoint as the version before did: one number of slices for all stages."""

    def older(routing: dict[str, Any]) -> dict[str, Any]:
        assert set(routing["slices"].values()) == {slices}
        return {**routing, "slices": slices}

    for path in store.glob("manifests/*"):
        manifest = Manifest.from_bytes(path.read_bytes())
        path.write_bytes(replace(manifest, routing=older(manifest.routing)).to_bytes())
    for path in store.glob("log/*"):
        record = json.loads(path.read_bytes().partition(b"\n")[2])
        if record.get("routing"):
            record["routing"] = older(record["routing"])
        body = json.dumps(record).encode()
        path.write_bytes(xxhash.xxh3_64_hexdigest(body).encode() + b"\n" + body)


@pytest.mark.parametrize("crash", [False, True], ids=["stopped", "crashed"])
def test_a_checkpoint_of_the_version_before_is_taken_over(
    crash: bool, tmp_path: Path, expected: dict[str, pl.DataFrame]
) -> None:
    store = tmp_path / "ck"
    settings: dict[str, Any] = {"checkpoint": str(store), "slices": 8}

    def rescale(job: Job) -> None:
        job.rescale("sums", 4)

    def fail(job: Job) -> None:
        raise OSError("on purpose")

    made = flow(tmp_path, None, None)
    if crash:  # the log has epochs that no checkpoint covers, and a routing table in one of them
        with pytest.raises(ps.PenstockError, match="on purpose"):
            run(made, {2: rescale, 7: fail}, **{**settings, "checkpoint_interval_s": 3600.0})
    else:
        run(made, {2: rescale}, epochs_max=6, **settings)
    as_before(store, 8)
    job = run(flow(tmp_path, None, None), **{**settings, "slices": 64, "instances": 3})
    assert counts_of(job) == {FIRST: 8, SECOND: 8}
    assert [n for n in job.notices if "slices=64 is ignored" in n]
    same(output(tmp_path), expected)


# -- in the flow -------------------------------------------------------------------------------------------------------


def stream() -> ps.Stream:
    return ps.Flow("f").source("in", testing.rows(ROWS))


@pytest.mark.parametrize("slices", [0, -1, 1.5, True, "8", SLICES_MAX + 1])
def test_a_number_of_slices_is_checked_where_it_is_written(slices: Any) -> None:
    with pytest.raises(FlowError, match="after 'in': key_by with"):
        stream().key_by("k", slices=slices)
    with pytest.raises(FlowError, match="after 'in': key_by with"):
        stream().hash_partition("k", 1, uid="by-k", slices=slices)


def test_a_partition_has_no_more_instances_than_slices() -> None:
    with pytest.raises(FlowError, match="stage 'by-k': 5 instances need as many slices, and it has slices=4") as error:
        stream().hash_partition("k", 5, uid="by-k", slices=4)
    assert error.value.remedy
    stream().hash_partition("k", 4, uid="by-k", slices=4)


def test_only_the_stage_that_follows_has_the_number() -> None:
    made = ps.Flow("f")
    counts = made.source("in", testing.rows(ROWS)).key_by("k", slices=6).aggregate("counts", n=ps.count())
    counts.top_k("top", 2, by="n").sink("out", ps.memory())
    slices = {node.id: node.slices for node in made.graph().nodes}
    assert slices == {"in": None, "counts": 6, "top": None, "out": None}
    assert "stage 1 'counts' (keyed by k, 6 slices)" in made.explain()


def test_both_sides_of_a_join_meet_in_one_number() -> None:
    def joined(left: int | None, right: int | None) -> ps.Stream:
        made = ps.Flow("f")
        rows = ROWS.with_columns(t=pl.datetime(2026, 1, 1))
        sides = [made.source(name, testing.rows(rows)) for name in ("a", "b")]
        within = ps.within("t", "t", before="1s", after="1s")
        return sides[0].key_by("k", slices=left).join("j", sides[1].key_by("k", slices=right), within=within)

    for left, right in ((8, None), (None, 8), (8, 8)):
        found = joined(left, right)
        found.sink("out", ps.memory())
        assert found.flow.graph().node("j").slices == 8
    with pytest.raises(FlowError, match="operator 'j': the left side has slices=8, the right side slices=4"):
        joined(8, 4)
