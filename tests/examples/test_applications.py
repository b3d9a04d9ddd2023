"""The applications compute what they say: each against an oracle that was written apart, in DuckDB or plain Python.

The expected outputs beside the examples show that nothing has changed; these tests show that it was right. Flows about
tweets and words also run over real tweets and speeches, where those are (see the fixture ``shared_data``).
"""

from __future__ import annotations

import gzip
import importlib.util
import math
import re
import sys
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta
from itertools import islice, pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import duckdb
import polars as pl
import pytest

from penstock import testing

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "examples" / "data"
Load = Callable[[str], ModuleType]

HOPS = """
    with numbered as (select *, row_number() over () as n from events),
         timed as (
            select *, max("{at}") over (order by n rows unbounded preceding) - interval {late} as mark from numbered
         ),
         panes as (select time_bucket(interval {every}, "{at}", timestamp '2000-01-01') as pane, * from timed),
         hops as (
            select pane + interval {every} * (k + 1) as window_end, window_end - interval {size} as window_start, *
            from panes, range({hops}) as r(k)
            where window_end > mark
         )
"""
"""Every event once for each hopping window that it belongs to and that is open when it comes."""


def hops(at: str, size: str, every: str, hops: int, late: str = "'0s'") -> str:
    return HOPS.format(at=at, size=size, every=every, hops=hops, late=late)


def query(sql: str, **tables: pl.DataFrame) -> pl.DataFrame:
    with duckdb.connect() as db:
        for name, frame in tables.items():
            db.register(name, frame.to_arrow())
        return db.sql(sql).pl()


def equal(found: pl.DataFrame, wanted: pl.DataFrame) -> None:
    """The same rows, in any order. Floats may differ in their last digits: an oracle adds up in an order of its own."""
    assert wanted.height > 0, "the oracle found nothing: it tests nothing"
    both = [frame.select(sorted(wanted.columns)) for frame in (found, wanted)]
    floats = [c for c, kind in both[0].schema.items() if kind.is_float()]
    exact = [[c for c in frame.columns if c not in floats] for frame in both]
    ordered = [frame.sort(names, maintain_order=True) for frame, names in zip(both, exact, strict=True)]
    assert ordered[0].select(exact[0]).rows() == ordered[1].select(exact[0]).rows()
    for column in floats:
        assert ordered[0][column].to_list() == pytest.approx(ordered[1][column].to_list(), rel=1e-9, abs=1e-9)


def source_of(module: ModuleType, id: str) -> pl.DataFrame:
    """All rows of a source of the flow, as the flow reads them."""
    source = next(node.source for node in module.flow.graph().nodes if node.id == id)
    first = source.initial_offset()
    planned = source.plan(first, 10**6)
    return pl.concat(source.read(id, split).frame for split in source.splits(first, planned.end, 1))


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Load:
    def module(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(f"application_{name}", ROOT / "examples" / f"{name}.py")
        assert spec is not None and spec.loader is not None
        loaded = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, loaded.__name__, loaded)
        spec.loader.exec_module(loaded)
        return loaded

    monkeypatch.chdir(tmp_path)
    return module


@pytest.fixture(params=["invented", "real"])
def tweets(request: pytest.FixtureRequest) -> pl.DataFrame:
    """The columns are the same: created, topic, sentiment, location, timezone, text."""
    if request.param == "invented":
        path = DATA / "tweets.csv"
    else:
        path = request.getfixturevalue("shared_data") / "tweets.csv.gz"
    return pl.read_csv(path).with_columns(pl.col("created").str.to_datetime(time_unit="us"))


@pytest.fixture(params=[{}, {"instances": 3, "epoch_rows": 40}], ids=["whole", "in epochs"])
def cut(request: pytest.FixtureRequest) -> dict[str, Any]:
    return dict(request.param)


def coarser(cut: dict[str, Any], rows: int) -> dict[str, Any]:
    """Of a long input, epochs of a twentieth: it is the cut that is tested, not patience."""
    return {**cut, "epoch_rows": max(cut["epoch_rows"], rows // 20)} if cut else {}


# --- C13: top-K frequent words ---------------------------------------------------------------------------------------


def test_top_words(load: Load, cut: dict[str, Any]) -> None:
    module = load("top_words")
    found = testing.collect(module.flow, "out", **cut)
    lines = source_of(module, "lines").iter_rows(named=True)
    rows = [{"ts": row["ts"], "word": w} for row in lines for w in row["line"].split(" ") if len(w) > 3]
    wanted = query(
        hops("ts", "'30s'", "'15s'", 2, "'5s'")
        + """, counts as (select word, window_end, count(*) as n from hops group by all)
        select * from (
            select *, row_number() over (partition by window_end order by n desc, word) as rank from counts
        ) where rank <= 3""",
        events=pl.DataFrame(rows),
    )
    equal(found.with_columns(pl.col("rank").cast(pl.Int64)), wanted)


# --- T12: top-K and distinct count of URLs ---------------------------------------------------------------------------


def test_top_urls(load: Load, cut: dict[str, Any]) -> None:
    module = load("top_urls")
    out = testing.run_local(module.flow, **cut)
    events = source_of(module, "clicks")
    bots = re.compile("|".join(module.BOTS))
    people = events.filter(~pl.Series([bool(bots.search(url)) for url in events["url"]]))
    assert people.height < events.height
    counted = (
        hops("at", "'30s'", "'2s'", 15)
        + ", counts as (select url, window_end, count(*) as clicks from hops group by all)"
    )
    top = query(
        f"""{counted} select * from (
            select *, row_number() over (partition by window_end order by clicks desc, url) as rank from counts
        ) where rank <= 3""",
        events=people,
    )
    equal(out["out"].with_columns(pl.col("rank").cast(pl.Int64)), top)
    distinct = query(
        f"{counted} select window_end - interval '30s' as window_start, count(*) as urls from counts group by all",
        events=people,
    )
    equal(out["distinct-out"], distinct)


# --- trending hashtags by region --------------------------------------------------------------------------------------


def test_trending_hashtags(load: Load, tweets: pl.DataFrame, cut: dict[str, Any]) -> None:
    module = load("trending_hashtags")
    found = testing.collect(module.flow, "out", sources={"tweets": tweets}, **coarser(cut, tweets.height))
    rows = [
        {"created": row["created"], "region": row["timezone"], "tag": tag.lower()}
        for row in tweets.iter_rows(named=True)
        for tag in re.findall(r"#\w+", row["text"])
        if row["timezone"] is not None
    ]
    wanted = query(
        hops("created", "'1h'", "'30m'", 2)
        + """, counts as (select region, tag, window_end, count(*) as n from hops group by all)
        select * from (
            select *, row_number() over (partition by region, window_end order by n desc, tag) as rank from counts
        ) where rank <= 2""",
        events=pl.DataFrame(rows),
    )
    equal(found.with_columns(pl.col("rank").cast(pl.Int64)), wanted)


# --- T12: network monitoring ------------------------------------------------------------------------------------------


def test_network_monitoring(load: Load, cut: dict[str, Any]) -> None:
    module = load("network_monitoring")
    out = testing.run_local(module.flow, **cut)
    events = source_of(module, "packets")
    slow = query(
        hops("at", "'10s'", "'10s'", 1, "'2s'")
        + """select sender, receiver, window_end, avg(latency_ms) as latency_ms, max(latency_ms) as slowest_ms
        from hops group by all having latency_ms > 50""",
        events=events,
    )
    equal(out["slow-out"], slow)
    thirty = hops("at", "'30s'", "'10s'", 3, "'2s'")
    suspects = query(
        thirty
        + """, traffic as (
            select sender, window_end, sum(bytes)::bigint as bytes, count(*) as records, count(distinct port) as ports
            from hops group by all
        )
        select *, case when ports >= 10 then 'scans ports' when bytes > 100000 then 'talks a lot' end as verdict
        from traffic where verdict is not null""",
        events=events,
    )
    equal(out["suspects-out"], suspects)
    late = query(f"{thirty} select * exclude (n, mark) from timed anti join hops using (n)", events=events)
    equal(out["late-out"], late)
    assert late.height < events.height / 10


# --- T12: audience insight --------------------------------------------------------------------------------------------


def test_audience_insight(load: Load, cut: dict[str, Any]) -> None:
    module = load("audience_insight")
    out = testing.run_local(module.flow, **cut)
    tables = {"players": source_of(module, "players"), "programmes": source_of(module, "programmes")}
    reports = """with reports as (
        select * from players asof join programmes
        on players.channel = programmes.channel and players."at" >= programmes.since
    )"""
    audience = query(
        f"""{reports} select programme, time_bucket(interval '5m', "at") as window_start,
            count(distinct viewer) as viewers, avg(stalled_s) as stalled_s
        from reports group by all""",
        **tables,
    )
    equal(out["audience-out"], audience)
    stays = query(
        f"""{reports},
        steps as (
            select *, "at" - lag("at") over (partition by viewer, programme order by "at") < interval '2m' as stays
            from reports
        ),
        numbered as (
            select *, count(*) filter (stays is not true) over (partition by viewer, programme order by "at") as session
            from steps
        ),
        sessions as (select viewer, programme, session, count(*) as reports, sum(stalled_s) as stalled_s
                     from numbered group by all)
        select programme, count(*) as sessions, avg(reports) as minutes, sum(stalled_s)::bigint as stalled_s
        from sessions group by all""",
        **tables,
    )
    equal(out["stays-out"].group_by("programme", maintain_order=True).last(), stays)


# --- T12: sentiment change with its reasons ---------------------------------------------------------------------------


def word_lists(shared_data: Path) -> tuple[dict[str, float], set[str]]:
    lines = (shared_data / "sentiment_lexicon.txt").read_text(encoding="utf-8").splitlines()
    lexicon = {line.split("\t")[0]: float(line.split("\t")[1]) for line in lines if line}
    return lexicon, set((shared_data / "stopwords_en.txt").read_text(encoding="utf-8").split())


def test_sentiment_change(
    load: Load,
    tweets: pl.DataFrame,
    cut: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    module = load("sentiment_change")
    if tweets.height > 1000:  # the real ones, with real word lists
        lexicon, stopwords = word_lists(request.getfixturevalue("shared_data"))
        monkeypatch.setattr(module, "LEXICON", lexicon)
        monkeypatch.setattr(module, "STOPWORDS", stopwords)
    found = testing.collect(module.flow, "out", sources={"tweets": tweets}, **coarser(cut, tweets.height))
    words = [
        {"created": row["created"], "topic": row["topic"], "tweet": n, "word": word}
        for n, row in enumerate(tweets.iter_rows(named=True))
        for word in re.findall(r"[a-z']+", row["text"].lower())
    ]
    lexicon = pl.DataFrame({"word": list(module.LEXICON), "worth": list(module.LEXICON.values())})
    wanted = query(
        """with worth as (
            select tweet, sum(coalesce(worth, 0)) as mood from words left join lexicon using (word) group by all
        ),
        moods as (
            select topic, time_bucket(interval '30m', created) as start, avg(coalesce(mood, 0)) as mood
            from tweets left join worth using (tweet) group by all
        ),
        changes as (
            select topic, start, mood, lag(mood) over (partition by topic order by start) as was from moods
        ),
        counts as (
            select topic, word, time_bucket(interval '30m', created) as start, count(*) as n
            from words where word not in (select word from stopwords) group by all
        ),
        deltas as (
            select a.topic, a.word, a.start, a.n - coalesce(b.n, 0) as more from counts a left join counts b
            on a.topic = b.topic and a.word = b.word and a.start = b.start + interval '30m'
        )
        select topic, start, mood, was, word, more from changes join deltas using (topic, start)
        where abs(mood - was) >= 1.0 and more >= 2""",
        words=pl.DataFrame(words),
        tweets=tweets.select("created", "topic").with_row_index("tweet"),
        lexicon=lexicon,
        stopwords=pl.DataFrame({"word": sorted(module.STOPWORDS)}),
    )
    # Two means may differ by 1, or by 1 less the last bit: that depends on the order in which an oracle adds up.
    clear = ((pl.col("mood") - pl.col("was")).abs() - 1.0).abs() > 1e-9
    equal(found.filter(clear), wanted.filter(clear))


# --- C13: tweet similarity --------------------------------------------------------------------------------------------


def test_tweet_similarity(load: Load, tweets: pl.DataFrame, cut: dict[str, Any]) -> None:
    module = load("tweet_similarity")
    found = testing.collect(module.flow, "out", sources={"tweets": tweets}, **coarser(cut, tweets.height))
    earlier: dict[str, list[tuple[datetime, set[str], str]]] = defaultdict(list)
    wanted = []
    for row in tweets.iter_rows(named=True):
        at, place, text = row["created"], row["location"], row["text"]
        if place is None:
            continue
        words = {word for word in re.findall("[a-z]+", text.lower()) if len(word) > 3}
        best = (2, at, "")
        for then, others, other in earlier[place]:
            if at - then <= timedelta(minutes=45) and len(words & others) >= 3:
                best = max(best, (len(words & others), then, other))
        if best[2]:
            wanted.append(
                {"location": place, "at": at, "text": text, "shared": best[0], "since": best[1], "similar": best[2]}
            )
        earlier[place].append((at, words, text))
    equal(found, pl.DataFrame(wanted))


# --- F1: streaming MapReduce ------------------------------------------------------------------------------------------


def spoken(shared_data: Path) -> pl.DataFrame:
    """The beginning of the real speeches, as if a line were said every half minute."""
    with gzip.open(shared_data / "speeches.txt.gz", "rt", encoding="utf-8", errors="replace") as text:
        lines = [line.strip().lower() for line in islice(text, 1500)]
    start = datetime(2026, 3, 2)
    return pl.DataFrame({"ts": [start + timedelta(seconds=30 * n) for n in range(len(lines))], "line": lines})


@pytest.mark.parametrize("kind", ["invented", "real"])
def test_word_frequencies(load: Load, kind: str, cut: dict[str, Any], request: pytest.FixtureRequest) -> None:
    module = load("word_frequencies")
    lines = spoken(request.getfixturevalue("shared_data")) if kind == "real" else source_of(module, "lines")
    found = testing.collect(module.flow, "out", sources={"lines": lines}, **coarser(cut, lines.height))
    times: dict[str, list[datetime]] = defaultdict(list)
    wanted = []
    for at, line in lines.iter_rows():
        for word in line.split():
            seen = times[word]
            seen.append(at)
            spans = (timedelta(hours=12), timedelta(hours=1), timedelta(minutes=15))
            wanted.append((word, at, len(seen), *(len(seen) - bisect_left(seen, at - span) for span in spans)))
    columns = ("word", "at", "n", "n_12h", "n_1h", "n_15m")
    equal(found, pl.DataFrame(wanted, schema=list(columns), orient="row"))


# --- timers: card fraud -----------------------------------------------------------------------------------------------


def angle(a: dict[str, Any], b: dict[str, Any]) -> float:
    """Between two places as seen from the middle of the earth: by vectors, where the example has the haversine."""
    places = [(math.radians(p["lat"]), math.radians(p["lon"])) for p in (a, b)]
    x, y = [(math.cos(la) * math.cos(lo), math.cos(la) * math.sin(lo), math.sin(la)) for la, lo in places]
    return math.acos(min(1.0, sum(p * q for p, q in zip(x, y, strict=True))))


def alerts(rows: Iterable[dict[str, Any]]) -> set[tuple[datetime, str, str]]:
    """With all events of a card at hand: no timers, no sessions that grow."""
    cards: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        cards[row["card"]].append(row)
    out = set()
    for card, events in cards.items():
        for a, b in pairwise(events):
            hours = (b["at"] - a["at"]) / timedelta(hours=1)
            if a["city"] != b["city"] and angle(a, b) * 6371 > 900 * hours:
                out.add((b["at"], card, f"in {a['city']}, then {hours * 60:.0f} minutes later in {b['city']}"))
        for order in (e for e in events if e["what"] == "ordered"):
            until = order["at"] + timedelta(minutes=15)
            if not any(e["what"] == "confirmed" and order["at"] < e["at"] < until for e in events):
                out.add((until, card, f"an order of {order['amount']} was not confirmed for 15 minutes"))
        visit: list[dict[str, Any]] = []
        for event in [*events, None]:
            if event is not None and visit and event["at"] - visit[-1]["at"] < timedelta(minutes=5):
                visit.append(event)
                continue
            if len(visit) >= 5:
                total = sum(e["amount"] for e in visit)
                out.add((visit[0]["at"], card, f"{len(visit)} payments in a row, {total} in all"))
            visit = [] if event is None else [event]
    return out


def test_card_fraud(load: Load, cut: dict[str, Any]) -> None:
    module = load("card_fraud")
    found = testing.collect(module.flow, "out", **cut)
    wanted = alerts(source_of(module, "payments").iter_rows(named=True))
    assert sorted(found.select("at", "card", "why").rows()) == sorted(wanted)
    assert len({why.split()[1] for _, _, why in wanted}) >= 3  # of each kind at least one


# --- the data, and the page about all of them ------------------------------------------------------------------------


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"script_{name}", ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    spec.loader.exec_module(module)
    return module


def test_the_data_is_what_its_script_makes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = script("example_data", monkeypatch)
    monkeypatch.setattr(module, "DATA", tmp_path)
    module.main()
    made = sorted(tmp_path.iterdir())
    assert len(made) == 6
    assert [path.name for path in made if path.read_bytes() != (DATA / path.name).read_bytes()] == []


def test_the_page_of_examples_is_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = script("explain_examples", monkeypatch).pages()
    stale = [str(path) for path, text in pages.items() if (ROOT / path).read_text(encoding="utf-8") != text]
    assert stale == [], "run: python scripts/explain_examples.py"
    assert not [str(path) for path, text in pages.items() if str(ROOT) in text or str(Path.home()) in text]
    drawn = {path.relative_to(ROOT) for path in (ROOT / "docs" / "img" / "flows").glob("*.svg")}
    assert drawn == {path for path in pages if path.suffix == ".svg"}
