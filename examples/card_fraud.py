"""Card fraud: cards in two places at once, orders that are never confirmed, sprees.

    python examples/card_fraud.py
    penstock run examples/card_fraud.py --checkpoint state/card-fraud

Two of the three kinds of fraud show when an event comes. The third shows when an event does *not* come. After an order
the operator sets a timer for a quarter of an hour, in the time of the data, and cancels it when the confirmation comes.
Like all state, a timer survives failures and moves with its key.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta
from math import asin, cos, radians, sin, sqrt
from pathlib import Path

import polars as pl

import penstock as ps

PAYMENTS = Path(__file__).parent / "data" / "payments.csv"
OUT = "out/card-fraud"
FASTEST_KMH = 900
ALERT = {"at": datetime, "card": str, "why": str}


@dataclass
class Place:
    at: datetime
    city: str
    lat: float
    lon: float


def distance_km(a: Place, b: Place) -> float:
    """The distance along the surface of the earth."""
    dlat, dlon = radians(b.lat - a.lat), radians(b.lon - a.lon)
    h = sin(dlat / 2) ** 2 + cos(radians(a.lat)) * cos(radians(b.lat)) * sin(dlon / 2) ** 2
    return 2 * 6371 * asin(sqrt(h))


class Watch(ps.Operator):
    def on_event(
        self, key: str, event: ps.Event, last: ps.Value[Place], order: ps.Value[int], timers: ps.Timers, emit: ps.Emit
    ) -> None:
        here, before = Place(event.at, event.city, event.lat, event.lon), last.get()
        if before is not None:
            hours = max((here.at - before.at).total_seconds(), 1) / 3600
            if distance_km(before, here) / hours > FASTEST_KMH:
                emit(here.at, key, f"in {before.city}, then {hours * 60:.0f} minutes later in {here.city}")
        last.set(here)
        if event.what == "ordered":
            order.set(event.amount)
            timers.set(event.at + timedelta(minutes=15), "confirmation")
        elif event.what == "confirmed" and timers.cancel("confirmation"):
            order.clear()

    def on_timer(self, key: str, at: datetime, order: ps.Value[int], emit: ps.Emit) -> None:
        emit(at, key, f"an order of {order.get(0)} was not confirmed for 15 minutes")
        order.clear()


flow = ps.Flow("card-fraud")
schema = {"at": datetime, "card": str, "what": str, "city": str, "amount": int, "lat": float, "lon": float}
payments = flow.source("payments", ps.files(PAYMENTS, schema=schema))

watched = payments.key_by("card").process("watch", Watch, on="at", schema=ALERT)
sprees = (
    payments.key_by("card")
    .window(ps.session("5m", on="at"))
    .aggregate("visits", n=ps.count(), amount=ps.sum("amount"))
    .where("many", pl.col("n") >= 5)
    .select("sprees", "card", at="window_start", why=pl.format("{} payments in a row, {} in all", "n", "amount"))
    .select("alerts", *ALERT)
)
watched.union("all", sprees).sink("out", ps.jsonl(OUT))


def show() -> None:
    for row in ps.read_output(OUT).sort("at", "card").iter_rows(named=True):
        print(f"{row['at']:%H:%M:%S}  {row['card']}  {row['why']}")


if __name__ == "__main__":
    ps.run(flow, checkpoint="state/card-fraud").wait()
    show()
