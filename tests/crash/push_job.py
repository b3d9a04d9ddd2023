"""A job that others send records to, to be killed: ``python push_job.py DIR``.

It writes its address to DIR/address and stops when its standard input is closed. Started again with the same DIR it
goes on.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import penstock as ps
from penstock.engines.job import start


def build(source: ps.Source, out: Path) -> ps.Flow:
    flow = ps.Flow("pushed")
    stream = flow.source("in", source)
    stream.sink("all", ps.parquet(out / "all", durable=False))
    stream.key_by("sender").aggregate("per_sender", n=ps.count(), last=ps.max("n")).sink(
        "counts", ps.parquet(out / "counts", durable=False)
    )
    return flow


def main(place: Path) -> None:
    source = ps.http_push(0, {"sender": str, "n": int}, path="/events")
    config = ps.Config(
        checkpoint=str(place / "checkpoint"), checkpoint_interval_s=0.05, instances=2, slices=4, poll_ms=5
    )
    job = start(build(source, place / "out"), engine="local", config=config)
    assert source.opened.wait(120)
    written = place / "address.new"
    written.write_text(source.address)
    os.replace(written, place / "address")
    sys.stdin.read()
    spool = source.spool
    with spool.wake:  # a stop leaves in the spool what no epoch has taken up; here nothing may be left
        assert spool.wake.wait_for(lambda: spool.backlog()[0] == 0, 60)
    job.stop()
    print("done", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
