"""Gaps: a custom operator tells which sensors were silent for more than 30 seconds, and how often so far.

    python examples/gaps.py
    penstock run examples/gaps.py --checkpoint state/gaps

The operator is plain Python. Penstock calls it for each event of a key, in the order of the source. The state of a key
is an ordinary dataclass, which Penstock stores, checkpoints and moves.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import penstock as ps

READINGS = Path(__file__).parent / "data" / "readings.csv"
OUT = "out/gaps"


@dataclass
class Seen:
    last: datetime
    gaps: int = 0


class Gaps(ps.Operator):
    def __init__(self, longest_s: float) -> None:
        self.longest_s = longest_s

    def on_event(self, key: str, event: Any, state: ps.Value[Seen], emit: Callable[..., None]) -> None:
        seen = state.get()
        if seen is None:
            state.set(Seen(event.at))
            return
        silent_s = (event.at - seen.last).total_seconds()
        if silent_s > self.longest_s:
            seen.gaps += 1
            emit(sensor=key, since=seen.last, silent_s=silent_s, gaps=seen.gaps)
        seen.last = event.at
        state.set(seen)


flow = ps.Flow("gaps")
readings = flow.source("readings", ps.files(READINGS, schema={"sensor": str, "at": datetime, "level": float}))
gaps = readings.key_by("sensor").process(
    "gaps", Gaps(longest_s=30), schema={"sensor": str, "since": datetime, "silent_s": float, "gaps": int}
)
gaps.sink("out", ps.csv(OUT))


def show() -> None:
    for row in ps.read_output(OUT).sort("since").iter_rows(named=True):
        print(f"{row['sensor']:6} silent for {row['silent_s']:.0f} s since {row['since']:%H:%M:%S}, gap {row['gaps']}")


if __name__ == "__main__":
    ps.run(flow, checkpoint="state/gaps").wait()
    show()
