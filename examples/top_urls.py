"""Top URLs: every 2 seconds the most clicked URLs and the number of different URLs of the last 30 s, without bots.

    python examples/top_urls.py
    penstock run examples/top_urls.py --checkpoint state/top-urls

A list of patterns takes out the clicks of bots. The other clicks go two ways. One way counts the clicks of each URL and
ranks the URLs. The other way counts the different URLs of each site and adds up the sites. A URL belongs to one site
only, so the sum is exact, and no container has to see every click.
"""

from datetime import datetime, timedelta

import numpy as np
import polars as pl

import penstock as ps

OUT, OUT_DISTINCT = "out/top-urls", "out/distinct-urls"
SITES = ("news.example", "shop.example", "maps.example", "wiki.example")
PAGES = ("", "today", "about", "search?q=rain", *(f"page/{n}" for n in range(1, 17)))
STRANGE = ("wp-login.php", ".git/config", "search?q=%27%20OR%201=1")
BOTS = (r"/wp-login", r"/\.git/", r"%27%20OR", r"^crawl\d*\.")
START = datetime(2026, 3, 2, 12, 0)


def clicks(first: int, n: int, rng: np.random.Generator) -> pl.DataFrame:
    """Invent ten clicks a second. Few pages get most of the clicks, and one click in ten comes from a bot."""
    urls = [f"{site}/{page}" for page in PAGES for site in SITES]
    bots = [f"{site}/{page}" for page in STRANGE for site in SITES] + [f"crawl{i}.example/" for i in range(3)]
    people = (rng.random(n) ** 2 * len(urls)).astype(int)
    robots = (rng.random(n) * len(bots)).astype(int)
    picked = np.where(rng.random(n) < 0.1, np.array(bots)[robots], np.array(urls)[people])
    times = [START + timedelta(milliseconds=100 * i) for i in range(first, first + n)]
    return pl.DataFrame({"at": times, "url": picked.tolist()})


flow = ps.Flow("top-urls")
people = (
    flow.source("clicks", ps.generator(clicks, schema={"at": datetime, "url": str}, rows=400, seed=4))
    .where("no-bots", ~pl.col("url").str.contains("|".join(BOTS)))
    .with_columns("site", site=pl.col("url").str.extract(r"^([^/]+)/"))
)
last_30s = ps.hopping("30s", every="2s", on="at")

top = people.key_by("url").window(last_30s).aggregate("counts", clicks=ps.count()).top_k("top", 3, by="clicks")
top.sink("out", ps.parquet(OUT))

distinct = (
    people.key_by("site")
    .window(last_30s)
    .aggregate("distinct", urls=ps.distinct("url"))
    .select("sites", "site", "urls", at="window_start", window=pl.lit("30s"))
    .key_by("window")
    .window(ps.tumbling("2s", on="at"))  # each start of a window falls into one of these
    .aggregate("sum", urls=ps.sum("urls"), sites=ps.count())
)
distinct.sink("distinct-out", ps.parquet(OUT_DISTINCT))


def show() -> None:
    distinct = dict(ps.read_output(OUT_DISTINCT).select("window_start", "urls").iter_rows())
    rows = ps.read_output(OUT).filter(pl.col("window_start") >= START).sort("window_start", "rank")
    for (start,), best in rows.group_by("window_start", maintain_order=True):
        ranked = ", ".join(f"{url} {n}" for url, n in best.select("url", "clicks").iter_rows())
        print(f"{start:%H:%M:%S}  {distinct[start]:2} URLs: {ranked}")


if __name__ == "__main__":
    ps.run(flow, checkpoint="state/top-urls").wait()
    show()
