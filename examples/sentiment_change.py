"""Sentiment change: topics whose mood has turned, and the words that say why.

    python examples/sentiment_change.py
    penstock run examples/sentiment_change.py --checkpoint state/sentiment-change

Tweets go two ways. One way gives the mean mood of every topic and half hour. It keeps the half hours whose mood differs
much from the half hour before. The other way counts the words of every topic and half hour, and keeps the words that
have become more frequent. A join by topic and time then gives the words that may explain the change.
"""

from datetime import datetime, timedelta
from pathlib import Path

import polars as pl

import penstock as ps

TWEETS = Path(__file__).parent / "data" / "tweets.csv"
OUT = "out/sentiment-change"
HALF_HOUR = timedelta(minutes=30)
LEXICON = {
    **dict.fromkeys(("good", "great", "lovely", "love", "thanks", "easy", "fast"), 2.0),
    **dict.fromkeys(("late", "slow", "broken", "crowded", "bad", "angry", "terrible", "cancelled", "stranded"), -2.0),
}
STOPWORDS = {"the", "a", "of", "on", "in", "to", "and", "for", "with", "was", "is", "no", "this", "my", "over", "from"}


def read(tweets: pl.DataFrame) -> pl.DataFrame:
    """Give the words of each tweet, and its mood: the sum of the scores of its words."""
    words = pl.col("text").str.to_lowercase().str.extract_all(r"[a-z']+")
    worth = pl.element().replace_strict(LEXICON, default=0.0, return_dtype=pl.Float64)
    return tweets.select("created", "topic", words=words).with_columns(mood=pl.col("words").list.eval(worth).list.sum())


def words(tweets: pl.DataFrame) -> pl.DataFrame:
    return tweets.select("created", "topic", word="words").explode("word").filter(~pl.col("word").is_in(STOPWORDS))


flow = ps.Flow("sentiment-change")
columns = {"created": datetime, "topic": str, "sentiment": str, "location": str, "timezone": str, "text": str}
tweets = flow.source("tweets", ps.files(TWEETS, schema=columns)).map_batches("read", read)
half_hours = ps.tumbling(HALF_HOUR, on="created")

change = (
    tweets.key_by("topic")
    .window(half_hours)
    .aggregate("moods", mood=ps.mean("mood"))
    .key_by("topic")
    .window(ps.last_rows(2))
    .aggregate("two-moods", was=ps.first("mood"), mood=ps.last("mood"), start=ps.last("window_start"))
    .where("changed", (pl.col("mood") - pl.col("was")).abs() >= 1.0)
    .with_columns("until", end=pl.col("start") + HALF_HOUR)
)
delta = (
    tweets.flat_map("words", words)
    .key_by("topic", "word")
    .window(half_hours)
    .aggregate("counts", n=ps.count())
    .key_by("topic", "word")
    .window(ps.last_rows(2, partial=True))  # with partial=True a new word counts, too
    .aggregate(
        "two-counts", n=ps.last("n"), was=ps.first("n"), start=ps.last("window_start"), since=ps.first("window_start")
    )
    .select(
        "more",
        "topic",
        "word",
        "start",
        more=pl.col("n") - pl.when(pl.col("since") == pl.col("start") - HALF_HOUR).then("was").otherwise(0),
        end=pl.col("start") + HALF_HOUR,
    )
    .where("hot", pl.col("more") >= 2)
)
same_half_hour = (ps.interval("start", "end"), ps.interval("start", "end"))
reasons = change.key_by("topic").join("reasons", delta.key_by("topic"), overlap=same_half_hour)
reasons.sink("out", ps.parquet(OUT))


def show() -> None:
    rows = ps.read_output(OUT).sort("start", "topic", "more", "word", descending=[False, False, True, False])
    for (start, topic), found in rows.group_by("start", "topic", maintain_order=True):
        was, mood = found.row(0, named=True)["was"], found.row(0, named=True)["mood"]
        print(f"{start:%H:%M}  {topic:6} {was:+.1f} -> {mood:+.1f}: {', '.join(found['word'].head(5))}")


if __name__ == "__main__":
    ps.run(flow, checkpoint="state/sentiment-change").wait()
    show()
