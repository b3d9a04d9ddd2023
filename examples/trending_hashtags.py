"""Trending hashtags: the hashtags of each region that are used most in an hour, counted anew every half hour.

    python examples/trending_hashtags.py
    penstock run examples/trending_hashtags.py --checkpoint state/trending-hashtags

Two keyed stages, one after the other: counts by region and hashtag, then a ranking by region. A tag that is used
in one region only is counted and ranked there; where the containers of both stages lie decides how far it travels.
"""

from datetime import datetime
from pathlib import Path

import polars as pl

import penstock as ps

TWEETS = Path(__file__).parent / "data" / "tweets.csv"
OUT = "out/trending-hashtags"


def hashtags(tweets: pl.DataFrame) -> pl.DataFrame:
    """A batch of tweets in, a batch of their hashtags out; tweets from nowhere, or without a hashtag, drop out."""
    tags = pl.col("text").str.to_lowercase().str.extract_all(r"#\w+")
    return tweets.select("created", region="timezone", tag=tags).explode("tag").drop_nulls()


flow = ps.Flow("trending-hashtags")
tweets = flow.source(
    "tweets",
    ps.files(
        TWEETS,
        schema={"created": datetime, "topic": str, "sentiment": str, "location": str, "timezone": str, "text": str},
    ),
)
trending = (
    tweets.flat_map("hashtags", hashtags)
    .hash_partition(["region", "tag"], 2, uid="by-tag")
    .window(ps.hopping("1h", every="30m", on="created"))
    .aggregate("counts", n=ps.count())
    .top_k("trending", 2, by="n", per="region")
)
trending.sink("out", ps.parquet(OUT))


def show() -> None:
    for (end, region), rows in (
        ps.read_output(OUT).sort("window_end", "region", "rank").group_by("window_end", "region", maintain_order=True)
    ):
        tags = "  ".join(f"{tag} {n}" for tag, n in rows.select("tag", "n").iter_rows())
        print(f"{end:%H:%M}  {region:9} {tags}")


if __name__ == "__main__":
    ps.run(flow, checkpoint="state/trending-hashtags").wait()
    show()
