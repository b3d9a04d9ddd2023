"""Network monitoring: the records of a network's switches show slow links, port scans and heavy talkers.

    python examples/network_monitoring.py
    penstock run examples/network_monitoring.py --checkpoint state/network-monitoring

One branch gives the mean latency between every two machines for every 10 seconds. Another gives for every sender the
bytes of the last 30 seconds and the number of different ports that it tried. A record that comes when its windows are
closed is not in these numbers. Such records come out as a stream of their own.
"""

from datetime import datetime
from pathlib import Path

import polars as pl

import penstock as ps

PACKETS = Path(__file__).parent / "data" / "packets.csv"
SLOW, SUSPECTS, LATE = "out/slow-links", "out/suspects", "out/late-records"

flow = ps.Flow("network-monitoring")
packets = flow.source(
    "packets",
    ps.files(
        PACKETS,
        schema={
            "at": datetime,
            "sender": str,
            "receiver": str,
            "port": int,
            "bytes": int,
            "latency_ms": float,
        },
    ),
)

links = (
    packets.hash_partition(["sender", "receiver"], 2, uid="by-link")
    .window(ps.tumbling("10s", on="at", lateness="2s"))
    .aggregate("latency", latency_ms=ps.mean("latency_ms"), slowest_ms=ps.max("latency_ms"))
    .where("slow", pl.col("latency_ms") > 50)
)
links.sink("slow-out", ps.csv(SLOW))

senders = packets.key_by("sender").window(ps.hopping("30s", every="10s", on="at", lateness="2s"))
suspects = (
    senders.aggregate("traffic", bytes=ps.sum("bytes"), records=ps.count(), ports=ps.distinct("port"))
    .with_columns(
        "verdict",
        verdict=pl.when(pl.col("ports") >= 10)
        .then(pl.lit("scans ports"))
        .when(pl.col("bytes") > 100_000)
        .then(pl.lit("talks a lot")),
    )
    .where("suspects", pl.col("verdict").is_not_null())
)
suspects.sink("suspects-out", ps.csv(SUSPECTS))
senders.late("late").sink("late-out", ps.csv(LATE))


def show() -> None:
    for row in ps.read_output(SLOW).sort("window_end").iter_rows(named=True):
        print(
            f"{row['window_start']:%H:%M:%S}  {row['sender']} -> {row['receiver']} is slow: "
            f"{row['latency_ms']:.0f} ms, {row['slowest_ms']:.0f} at most"
        )
    for row in ps.read_output(SUSPECTS).sort("window_end", "sender").iter_rows(named=True):
        print(
            f"{row['window_start']:%H:%M:%S}  {row['sender']:7} {row['verdict']}: "
            f"{row['bytes'] / 1000:.1f} kB, {row['records']} records, ports: {row['ports']}"
        )
    for row in ps.read_output(LATE).sort("at").iter_rows(named=True):
        print(f"{row['at']:%H:%M:%S}  {row['sender']} -> {row['receiver']}: too late to be counted")


if __name__ == "__main__":
    ps.run(flow, checkpoint="state/network-monitoring").wait()
    show()
