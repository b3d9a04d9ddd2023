"""Word frequencies by streaming MapReduce: how often each word came so far, in 15 minutes, in an hour and in 12 hours.

    python examples/word_frequencies.py
    penstock run examples/word_frequencies.py --checkpoint state/word-frequencies

Penstock calls ``map`` for each line, which emits pairs of key and value. It calls ``reduce`` for each pair, with the
state of the key. A batch job would wait for the last line; this flow gives the new counts after every word.
"""

from datetime import datetime
from pathlib import Path
from typing import Annotated

import penstock as ps

BULLETINS = Path(__file__).parent / "data" / "bulletins.jsonl"
OUT = "out/word-frequencies"


def words(event: ps.Event, emit: ps.Emit) -> None:
    for word in event.line.split():
        emit(word, event.ts)


def count(
    word: str,
    at: datetime,
    total: ps.Value[int],
    quarter: Annotated[ps.TimeWindow[None], ps.keep("15m")],
    hour: Annotated[ps.TimeWindow[None], ps.keep("1h")],
    half_day: Annotated[ps.TimeWindow[None], ps.keep("12h")],
    emit: ps.Emit,
) -> None:
    total.set(total.get(0) + 1)
    for window in (quarter, hour, half_day):
        window.add(at, None)
    emit(word=word, at=at, n=total.get(), n_12h=len(half_day), n_1h=len(hour), n_15m=len(quarter))


flow = ps.Flow("word-frequencies")
frequencies = flow.source("lines", ps.files(BULLETINS, schema={"ts": datetime, "line": str})).map_reduce(
    "frequencies",
    map=words,
    reduce=count,
    key=str,
    value=datetime,
    schema={"word": str, "at": datetime, "n": int, "n_12h": int, "n_1h": int, "n_15m": int},
)
frequencies.sink("out", ps.parquet(OUT))


def show() -> None:
    now = ps.read_output(OUT).group_by("word", maintain_order=True).last()
    print("word     until    all  12 h   1 h  15 min")
    for row in now.sort("n", "word", descending=[True, False]).head(14).iter_rows(named=True):
        counts = f"{row['n']:5} {row['n_12h']:5} {row['n_1h']:5} {row['n_15m']:7}"
        print(f"{row['word']:8} {row['at']:%H:%M} {counts}")


if __name__ == "__main__":
    ps.run(flow, checkpoint="state/word-frequencies").wait()
    show()
