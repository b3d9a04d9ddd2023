"""SIGKILL of a job that others send records to: every record that was acknowledged counts, exactly once.

Senders do what senders should: no 200, send again, with the same key. They do not know whether the job died before or
after their records were kept; the key does.
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from urllib.parse import urlsplit

import polars as pl
import pytest

import penstock as ps
from tests.crash import push_job

pytestmark = pytest.mark.crash

SCRIPT = Path(push_job.__file__)
SENDERS, RECORDS = 3, 60


class Life:
    """One start of the job."""

    def __init__(self, place: Path) -> None:
        (place / "address").unlink(missing_ok=True)
        path = os.pathsep.join([str(SCRIPT.parents[2] / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.place = place
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", str(SCRIPT), str(place)],
            env={**os.environ, "PYTHONPATH": path, "POLARS_MAX_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def stop(self) -> None:
        said, errors = self.process.communicate()
        assert self.process.returncode == 0 and "done" in said, errors


class Sender(threading.Thread):
    """Sends until each record has been acknowledged. ``acknowledged`` counts them over all senders."""

    def __init__(self, place: Path, name: str, acknowledged: threading.Semaphore, give_up: threading.Event) -> None:
        super().__init__(name=name, daemon=True)
        self.place, self.acknowledged, self.give_up = place, acknowledged, give_up
        self.again = 0

    def run(self) -> None:
        for n in range(RECORDS):
            body = json.dumps({"sender": self.name, "n": n})
            while not self._send(body, f"{self.name}-{n}"):
                self.again += 1
                if self.give_up.wait(0.02):
                    return
                if n:  # not sure of the one before either, though it was acknowledged
                    self._send(json.dumps({"sender": self.name, "n": n - 1}), f"{self.name}-{n - 1}")
            self.acknowledged.release()

    def _send(self, body: str, key: str) -> bool:
        try:
            url = urlsplit((self.place / "address").read_text())
        except FileNotFoundError:
            return False
        connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=120)
        try:
            connection.request("POST", url.path, body, {"Idempotency-Key": key})
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


@pytest.mark.slow
def test_acknowledged_records_count_once_however_often_the_job_dies(tmp_path: Path) -> None:
    acknowledged, give_up = threading.Semaphore(0), threading.Event()
    senders = [Sender(tmp_path, f"s{i}", acknowledged, give_up) for i in range(SENDERS)]
    life = Life(tmp_path)
    try:
        for sender in senders:
            sender.start()
        for _ in range(3):  # each life is ended after some tens of acknowledgements, in the midst of the others
            for _ in range(SENDERS * RECORDS // 5):
                while not acknowledged.acquire(timeout=1):
                    assert life.process.poll() is None, life.process.communicate()
            life.kill()
            life = Life(tmp_path)
        for sender in senders:
            sender.join(120)
            assert not sender.is_alive()
        life.stop()
    finally:
        give_up.set()
        if life.process.poll() is None:
            life.kill()
    rows = ps.read_output(tmp_path / "out" / "all")
    wanted = sorted((f"s{i}", n) for i in range(SENDERS) for n in range(RECORDS))
    assert sorted(rows.select("sender", "n").rows()) == wanted
    counts = ps.read_output(tmp_path / "out" / "counts").group_by("sender").agg(pl.col("n").max()).sort("sender")
    assert counts.rows() == [(f"s{i}", RECORDS) for i in range(SENDERS)]
    assert sum(s.again for s in senders) > 0, "nobody ever had to send again: nothing was tested"
