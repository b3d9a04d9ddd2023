"""Word count: how often each word has come so far.

    python examples/word_count.py
    penstock run examples/word_count.py --checkpoint state/word-count

A running aggregate never ends. Every epoch gives the new count of each word that came in the epoch. The last row of a
word is its count now. A second run of the example resumes from the checkpoint, finds nothing new to read, and shows the
same counts.
"""

from pathlib import Path

import polars as pl

import penstock as ps

POEMS = Path(__file__).parent / "data" / "poems"
OUT = "out/word-count"


def split(lines: pl.DataFrame) -> pl.DataFrame:
    """Turn a batch of lines into a batch of words."""
    return lines.select(word=pl.col("line").str.split(" ")).explode("word")


flow = ps.Flow("word-count")
words = flow.source("lines", ps.files(f"{POEMS}/*.txt")).flat_map("words", split)
words.key_by("word").aggregate("counts", n=ps.count()).sink("out", ps.jsonl(OUT))


def show() -> None:
    now = ps.read_output(OUT).group_by("word", maintain_order=True).last()
    for word, n in now.sort("n", "word", descending=[True, False]).select("word", "n").head(8).iter_rows():
        print(f"{n:3}  {word}")


if __name__ == "__main__":
    ps.run(flow, checkpoint="state/word-count").wait()
    show()
