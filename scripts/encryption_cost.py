"""What authentication and encryption cost: words a second on ``local-cluster`` with each setting, one run each.

``python scripts/encryption_cost.py [ROWS]``. A Spark of its own for each run, so each is a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import polars as pl

import penstock as ps
from penstock.config import Config
from penstock.engines.job import start

EPOCH_ROWS = 200_000
CRYPTO, AUTHENTICATE = "spark.network.crypto.enabled", "spark.authenticate"
RUNS = {
    "as it is set": {},
    "not encrypted": {CRYPTO: "false"},
    "not authenticated either": {CRYPTO: "false", AUTHENTICATE: "false"},
    "local disks encrypted too": {"spark.io.encryption.enabled": "true"},
}


def make(first: int, n: int, rng: object) -> pl.DataFrame:
    number = pl.int_range(first, first + n, eager=True) * 7_919 % 200_003
    return pl.DataFrame({"word": "a-word-of-some-length-" + number.cast(pl.String)})


def rate(spark: dict[str, str], rows: int) -> float:
    """Rows a second after the first quarter of the epochs."""
    with tempfile.TemporaryDirectory() as place:
        flow = ps.Flow("words")
        words = flow.source("in", ps.generator(make, rows=rows, schema={"word": str}))
        words.key_by("word").aggregate("counts", n=ps.count()).sink("out", ps.parquet(Path(place) / "out"))
        config = Config(
            master="local-cluster[2,1,1024]",
            checkpoint=f"{place}/checkpoint",
            instances=2,
            epoch_rows=EPOCH_ROWS,
            spark=spark,
        )
        published: list[float] = []
        job = start(flow, config=config)
        job._runtime.on_published.append(lambda epoch: published.append(time.monotonic()))
        job.wait()
    steady = published[len(published) // 4 :]
    return (len(steady) - 1) * EPOCH_ROWS / (steady[-1] - steady[0])


def main() -> None:
    if len(sys.argv) == 3:
        print(rate(json.loads(sys.argv[1]), int(sys.argv[2])))
        return
    rows = sys.argv[1] if len(sys.argv) > 1 else "10000000"
    for name, spark in RUNS.items():
        command = [sys.executable, __file__, json.dumps(spark), rows]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        print(f"{name:28}{float(done.stdout.split()[-1]):12,.0f} rows a second", flush=True)


if __name__ == "__main__":
    main()
