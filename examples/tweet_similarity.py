"""Tweet similarity: for each tweet the most similar one from the same place in the last 45 minutes.

    python examples/tweet_similarity.py
    penstock run examples/tweet_similarity.py --checkpoint state/tweet-similarity

Tweets are similar if they share many words. The operator keeps a window of the tweets of each place, and compares each
new tweet with the whole window. So a tweet costs more work where a place has more tweets.
"""

import re
from datetime import datetime
from pathlib import Path
from typing import Annotated

import polars as pl

import penstock as ps

TWEETS = Path(__file__).parent / "data" / "tweets.csv"
OUT = "out/tweet-similarity"


def vocabulary(text: str) -> set[str]:
    """Give the words of a tweet that have four letters or more: these say what the tweet is about."""
    return set(re.findall(r"[a-z]{4,}", text.lower()))


class MostSimilar(ps.Operator):
    def __init__(self, shared_min: int) -> None:
        self.shared_min = shared_min

    def on_event(
        self,
        key: str,
        event: ps.Event,
        recent: Annotated[ps.TimeWindow[str], ps.keep("45m")],
        emit: ps.Emit,
    ) -> None:
        words = vocabulary(event.text)
        found = [(len(words & vocabulary(text)), at, text) for at, text in recent.items()]
        shared, since, similar = max(found, default=(0, None, None))
        if shared >= self.shared_min:
            emit(location=key, at=event.created, text=event.text, since=since, similar=similar, shared=shared)
        recent.add(event.created, event.text)


flow = ps.Flow("tweet-similarity")
tweets = flow.source(
    "tweets",
    ps.files(
        TWEETS,
        schema={"created": datetime, "topic": str, "sentiment": str, "location": str, "timezone": str, "text": str},
    ),
)
similar = (
    tweets.where("somewhere", pl.col("location").is_not_null())
    .key_by("location")
    .process(
        "similar",
        MostSimilar(shared_min=3),
        on="created",
        schema={"location": str, "at": datetime, "text": str, "since": datetime, "similar": str, "shared": int},
    )
)
similar.sink("out", ps.parquet(OUT))


def show() -> None:
    for row in ps.read_output(OUT).filter(pl.col("text") != pl.col("similar")).sort("at").iter_rows(named=True):
        print(f"{row['at']:%H:%M}  {row['location']:7} {row['text']}")
        print(f"       {row['shared']} words of {row['since']:%H:%M}: {row['similar']}")


if __name__ == "__main__":
    ps.run(flow, checkpoint="state/tweet-similarity").wait()
    show()
