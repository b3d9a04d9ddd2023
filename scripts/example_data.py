"""Makes the data of the applications in ``examples/data/``: invented, small, and the same at every run.

    python scripts/example_data.py

Each file tells a short story that its example finds again: a storm that spoils a day of ferries, a machine that tries
every port, a card that is in two cities at once. The stories are written down here; chance fills in the rest. Rows
come in the order of arrival, which is not always that of their times.
"""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parent.parent / "examples" / "data"
DAY = datetime(2026, 3, 2)


def at(clock: str, seconds: float = 0) -> datetime:
    """A time of the day: "09:30" or "09:30:15"."""
    parts = [int(part) for part in clock.split(":")]
    return (
        DAY + timedelta(**dict(zip(("hours", "minutes", "seconds"), parts, strict=False))) + timedelta(seconds=seconds)
    )


def write(path: Path, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as out:
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(columns)
        for row in rows:
            writer.writerow([v.isoformat() if isinstance(v, datetime) else v for v in row])


# --- tweets: tweet_similarity, sentiment_change, trending_hashtags ---------------------------------------------------

PLACES = {
    "Porto": "Lisbon",
    "Braga": "Lisbon",
    "Athens": "Athens",
    "Patras": "Athens",
    "Turku": "Helsinki",
    "Espoo": "Helsinki",
}
CALM = {
    "ferry": [
        ("positive", "lovely crossing on the morning ferry, thanks to the crew #sea"),
        ("positive", "the ferry was on time and the coffee was good #sea #morning"),
        ("neutral", "on the ferry to the islands with my bike #islands"),
        ("positive", "great view from the upper deck of the ferry today #sea"),
    ],
    "tram": [
        ("negative", "the tram is crowded again and late #commute"),
        ("neutral", "reading on the tram to the museum #commute"),
        ("negative", "broken doors on the old tram, what a slow start #morning"),
        ("positive", "a good seat on the tram for once #commute"),
    ],
    "bikes": [
        ("neutral", "rode the river path on a shared bike #cycling"),
        ("positive", "fast and easy, I love the new bikes #cycling"),
        ("negative", "a flat tyre on a shared bike, bad luck #cycling"),
        ("neutral", "shared bike to the market and back #morning"),
    ],
}
STORM = {
    "ferry": [
        ("negative", "ferry cancelled because of the storm, angry queue at the pier #storm"),
        ("negative", "the storm again, no ferry tonight and a terrible wait #storm #stranded"),
        ("negative", "stranded on the pier, ferry cancelled, bad night ahead #stranded"),
        ("neutral", "waves over the pier, the storm is here #storm"),
    ],
    "tram": [
        ("positive", "the tram runs through the storm, thanks to the drivers #storm"),
        ("positive", "new tram line open, fast and good #newline"),
        ("positive", "great new tram line, on time all evening #newline"),
        ("neutral", "everyone takes the tram in this storm #storm"),
    ],
    "bikes": CALM["bikes"],
}


def tweets() -> None:
    """Three hours. At ten a storm comes up in the west, and a new tram line opens."""
    rng = random.Random(7)
    rows = []
    for minute in range(0, 180, 2):
        when = at("09:00", minute * 60 + rng.randrange(0, 110))
        place = rng.choice(list(PLACES))
        topic = rng.choice(list(CALM))
        sentiment, text = rng.choice((CALM if minute < 75 else STORM)[topic])
        located = rng.random() > 0.08
        rows.append((when, topic, sentiment, place if located else "", PLACES[place] if located else "", text))
    columns = ("created", "topic", "sentiment", "location", "timezone", "text")
    write(DATA / "tweets.csv", columns, rows)


# --- network flows: network_monitoring ------------------------------------------------------------------------------


def packets() -> None:
    """Two minutes of a small network. One machine scans ports, one sends far more than all others, one link slows."""
    rng = random.Random(11)
    rows: list[tuple[Any, ...]] = []
    hosts = ["web-1", "web-2", "app-1", "app-2", "db-1"]
    for second in range(0, 120, 2):
        sender, receiver = rng.sample(hosts, 2)
        port = rng.choice([443, 8080, 5432])
        slow = (sender, receiver) == ("app-1", "db-1") and second > 50
        rows.append((second, sender, receiver, port, rng.randrange(2, 60) * 100, rng.gauss(95 if slow else 4, 1)))
    for second in range(52, 112, 6):
        rows.append((second, "app-1", "db-1", 5432, rng.randrange(2, 40) * 100, rng.gauss(92, 6)))
    for second in range(30, 58):
        rows.append((second, "guest-7", "db-1", 1000 + 17 * (second - 30), 60, rng.gauss(5, 1)))
    for second in range(80, 105, 5):
        rows.append((second, "web-2", "app-2", 8080, 48_000 + rng.randrange(9000), rng.gauss(6, 1)))
    rows.sort(key=lambda row: row[0])
    # Three reports arrive when their windows have long been closed.
    delayed = [rows.pop(n) for n in (40, 20, 5)]
    for n, row in zip((60, 75, 90), delayed, strict=True):
        rows.insert(n, row)
    columns = ("at", "sender", "receiver", "port", "bytes", "latency_ms")
    write(DATA / "packets.csv", columns, [(at("10:00", r[0]), *r[1:5], round(r[5], 1)) for r in rows])


# --- viewers and programmes: audience_insight -------------------------------------------------------------------------

PROGRAMMES = [
    ("one", "19:00", "News", "news"),
    ("two", "19:00", "Rivers of Asia", "nature"),
    ("one", "19:10", "The Weather", "news"),
    ("one", "19:14", "Cup Final", "sport"),
    ("two", "19:20", "Late Film", "film"),
]


def viewers() -> None:
    """Half an hour of players that report every minute their channel and how long the picture stood still."""
    rng = random.Random(5)
    write(
        DATA / "programmes.csv",
        ("channel", "since", "programme", "genre"),
        [(c, at(s), p, g) for c, s, p, g in PROGRAMMES],
    )
    rows = []
    for viewer in range(1, 13):
        minute = rng.randrange(0, 8)
        while minute < 30:
            channel = rng.choice(["one", "one", "two"])
            stays = rng.randrange(3, 12)
            for m in range(minute, min(minute + stays, 30)):
                crowded = channel == "one" and m >= 14
                stalled = rng.choice([0, 0, 2, 4, 7] if crowded else [0, 0, 0, 0, 1])
                rows.append((at("19:00", 60 * m + 3 * viewer), f"v{viewer:02}", channel, stalled))
            minute += stays + rng.choice([0, 0, 6])
    write(DATA / "players.csv", ("at", "viewer", "channel", "stalled_s"), sorted(rows))


# --- bulletins: word_frequencies ------------------------------------------------------------------------------------

BULLETINS = {
    0: ["snow on the high road", "the high road is closed", "snow and ice in the valley", "a plough is on the road"],
    6: ["trains run late", "snow on the line", "the road is open", "buses run late in the valley"],
    11: ["sun in the valley", "the market is open", "music at the market tonight", "sun and music at the lake"],
    13: ["music at the lake", "the market stays open tonight", "music and fire at the lake tonight"],
}


def bulletins() -> None:
    """Fourteen hours of a local station: snow at night, music in the evening."""
    rng = random.Random(3)
    with (DATA / "bulletins.jsonl").open("w", encoding="utf-8") as out:
        for minute in range(0, 14 * 60, 12):
            lines = BULLETINS[max(h for h in BULLETINS if h * 60 <= minute)]
            row = {"ts": at("06:00", 60 * minute + rng.randrange(60)).isoformat(), "line": rng.choice(lines)}
            out.write(json.dumps(row) + "\n")


# --- payments: card_fraud -------------------------------------------------------------------------------------------

CITIES = {"Lisbon": (38.72, -9.14), "Porto": (41.15, -8.61), "Athens": (37.98, 23.73), "Turku": (60.45, 22.27)}


def payments() -> None:
    """A morning of twenty cards. Some are in two cities at once, some order and never confirm, some go on a spree."""
    rng = random.Random(9)
    homes = {f"card-{n:02}": rng.choice(list(CITIES)) for n in range(1, 21)}
    rows: list[tuple[datetime, str, str, str, int]] = []
    for card, city in homes.items():
        rows += [(at("08:00", rng.randrange(4 * 3600)), card, "paid", city, rng.randrange(3, 90)) for _ in range(3)]
    for card, clock in (("card-03", "09:52"), ("card-11", "08:41"), ("card-16", "11:30")):
        away = next(city for city in ("Turku", "Athens") if city != homes[card])
        rows += [(at(clock, -720), card, "paid", homes[card], 18), (at(clock), card, "paid", away, 410)]
    for card, clock, minutes in (("card-02", "08:30", 3), ("card-05", "10:05", 0), ("card-07", "11:00", 25)):
        rows.append((at(clock), card, "ordered", homes[card], 640))
        if minutes:
            rows.append((at(clock, 60 * minutes), card, "confirmed", homes[card], 640))
    for card, clock, payments in (("card-08", "11:10", 6), ("card-19", "09:05", 5)):
        rows += [(at(clock, 70 * n), card, "paid", homes[card], 95) for n in range(payments)]
    table = [(*row, *CITIES[row[3]]) for row in sorted(rows)]
    write(DATA / "payments.csv", ("at", "card", "what", "city", "amount", "lat", "lon"), table)


def main() -> None:
    for make in (tweets, packets, viewers, bulletins, payments):
        make()


if __name__ == "__main__":
    main()
