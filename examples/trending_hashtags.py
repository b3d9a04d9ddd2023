"""Trending hashtags: the hashtags of each region that are used most in an hour, counted anew every half hour.

    python examples/trending_hashtags.py
    penstock run examples/trending_hashtags.py --checkpoint state/trending-hashtags

The flow has two keyed stages. The first counts by region and hashtag, and the second ranks the hashtags of each region.
A count travels from a container of the first stage to one of the second. How far it travels depends on the machines on
which the two containers live.
"""

from datetime import datetime
from pathlib import Path

import polars as pl

import penstock as ps

TWEETS = Path(__file__).parent / "data" / "tweets.csv"
OUT = "out/trending-hashtags"


def hashtags(tweets: pl.DataFrame) -> pl.DataFrame:
    """Turn a batch of tweets into a batch of their hashtags. Tweets without a region or a hashtag drop out."""
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
