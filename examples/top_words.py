"""Top words: the most frequent long words of the last 30 seconds, every 15 seconds.

    python examples/top_words.py
    penstock run examples/top_words.py --checkpoint state/top-words

Time is the time in the data, not the time of the clock on the wall. A line counts even if it comes up to 5 seconds
later than a newer line. The input has one line that comes late and counts. It has another one that comes far too late:
Penstock drops this line and counts it as late.
"""

from datetime import datetime
from pathlib import Path

import polars as pl

import penstock as ps

TALK = Path(__file__).parent / "data" / "talk.jsonl"
OUT = "out/top-words"


def split(lines: pl.DataFrame) -> pl.DataFrame:
    """Turn a batch of lines into a batch of words. Each word keeps the time of its line."""
    return lines.select("ts", word=pl.col("line").str.split(" ")).explode("word")


flow = ps.Flow("top-words")
words = (
    flow.source("lines", ps.files(TALK, schema={"ts": datetime, "line": str}))
    .flat_map("words", split)
    .where("long", pl.col("word").str.len_chars() > 3)
)
top = (
    words.key_by("word")
    .window(ps.hopping("30s", every="15s", on="ts", lateness="5s"))
    .aggregate("counts", n=ps.count())
    .top_k("top", 3, by="n")
)
top.sink("out", ps.parquet(OUT))


def show() -> None:
    for row in ps.read_output(OUT).sort("window_end", "rank").iter_rows(named=True):
        print(
            f"{row['window_start']:%H:%M:%S} - {row['window_end']:%H:%M:%S}  {row['rank']}.  {row['word']:8} {row['n']}"
        )


if __name__ == "__main__":
    ps.run(flow, checkpoint="state/top-words").wait()
    show()
