"""Audience insight: who watches which programme, how long, and how well the picture comes through.

    python examples/audience_insight.py
    penstock run examples/audience_insight.py --checkpoint state/audience-insight

Players report every minute which channel they show and for how many seconds the picture stood still. A table that
changes says which programme a channel shows: each programme lasts until the next one begins. A report meets the row of
the table that was valid at the report's own time, even if the next programme is on when the report comes.
"""

from datetime import datetime
from pathlib import Path

import polars as pl

import penstock as ps

DATA = Path(__file__).parent / "data"
AUDIENCE, STAYS = "out/audience", "out/stays"

flow = ps.Flow("audience-insight")
players = flow.source(
    "players",
    ps.files(DATA / "players.csv", schema={"at": datetime, "viewer": str, "channel": str, "stalled_s": int}),
)
programmes = flow.source(
    "programmes",
    ps.files(DATA / "programmes.csv", schema={"channel": str, "since": datetime, "programme": str, "genre": str}),
)
reports = players.key_by("channel").lookup("showing", programmes.key_by("channel"), on="at", version="since")

audience = (
    reports.hash_partition("programme", 2, uid="by-programme")
    .window(ps.tumbling("5m", on="at"))
    .aggregate("audience", viewers=ps.distinct("viewer"), stalled_s=ps.mean("stalled_s"))
)
audience.sink("audience-out", ps.parquet(AUDIENCE))

stays = (
    reports.key_by("viewer", "programme")
    .window(ps.session("2m", on="at"))  # a viewer who says nothing for two minutes has left
    .aggregate("sessions", reports=ps.count(), stalled_s=ps.sum("stalled_s"))
    .key_by("programme")
    .aggregate("stays", sessions=ps.count(), minutes=ps.mean("reports"), stalled_s=ps.sum("stalled_s"))
)
stays.sink("stays-out", ps.parquet(STAYS))


def show() -> None:
    for row in ps.read_output(AUDIENCE).sort("window_end", "programme").iter_rows(named=True):
        bar = "*" * row["viewers"]
        print(f"{row['window_start']:%H:%M}  {row['programme']:15} {bar:10} {row['stalled_s']:.1f} s/min stalled")
    now = ps.read_output(STAYS).group_by("programme", maintain_order=True).last()
    for row in now.sort(pl.col("minutes"), descending=True).iter_rows(named=True):
        print(f"{row['programme']:15} {row['sessions']:2} sessions of {row['minutes']:.1f} minutes")


if __name__ == "__main__":
    ps.run(flow, checkpoint="state/audience-insight").wait()
    show()
