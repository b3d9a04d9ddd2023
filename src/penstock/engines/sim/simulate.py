"""Many seeds, one after the other: what ``penstock simulate`` and the tests call.

An ``Outcome`` has all that is worth keeping of a seed. For one that failed that is the story: what the world did, what
the controller heard and ordered, each command with its cause. The seed alone brings it back.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from penstock.engines.sim.checkers import Violation
from penstock.engines.sim.world import World

STORY_LINES = 60
"""Of a failed seed, as it is shown; the whole of it is in the outcome."""


@dataclass(frozen=True)
class Outcome:
    seed: int
    digest: str
    virtual_s: float
    epochs: int
    starts: int
    deaths: int
    recoveries: int
    checker: str | None = None
    """Which checker found a violation, if one did."""
    message: str = ""
    story: tuple[str, ...] = ()
    orders: int = 0
    """Given in a storm, to a driver that was there."""
    refused: int = 0
    """Of those, refused at once with a reason."""
    kills: int = 0
    storm: bool = False

    @property
    def ok(self) -> bool:
        return self.checker is None

    @property
    def replay(self) -> str:
        return f"penstock simulate --seed {self.seed}{' --storm' if self.storm else ''} --verbose"

    def lines(self, whole: bool = False) -> list[str]:
        """What is shown of it: the end of the story, what was wrong, and how to see it again."""
        story = self.story if whole else self.story[-STORY_LINES:]
        left = [f"... {len(self.story) - len(story)} lines before"] if len(story) < len(self.story) else []
        verdict = "" if self.ok else f"seed {self.seed} violates {self.checker}: {self.message}"
        ending = [verdict, f"Again with: {self.replay}"] if verdict else [f"seed {self.seed}: digest {self.digest}"]
        return [*left, *story, *ending]


def simulate(seed: int, *, keep_story: bool = False, storm: bool = False) -> Outcome:
    """Run one seed to its end, or to the first violation."""
    world = World(seed, storm)
    found: Violation | None = None
    try:
        world.run()
    except Violation as violation:
        found = violation
    return Outcome(
        seed,
        world.digest(),
        world.schedule.now,
        world.epochs(),
        world.starts,
        world.deaths,
        world.recoveries,
        found.checker if found else None,
        found.message if found else "",
        tuple(tell(world)) if found or keep_story else (),
        *((sum(s.given.values()), s.refused, s.kills) if (s := world.storm) is not None else (0, 0, 0)),
        storm,
    )


def tell(world: World) -> Iterator[str]:
    """The story as lines of text."""
    for now, kind, text in world.story:
        yield f"{now:9.3f}  {kind:<8}{text}"


@dataclass
class Campaign:
    """What came of many seeds."""

    seeds: int = 0
    elapsed_s: float = 0.0
    epochs: int = 0
    starts: int = 0
    deaths: int = 0
    recoveries: int = 0
    virtual_s: float = 0.0
    orders: int = 0
    refused: int = 0
    kills: int = 0
    violations: list[Outcome] = field(default_factory=list)

    @property
    def seeds_per_s(self) -> float:
        return self.seeds / self.elapsed_s if self.elapsed_s else 0.0

    def add(self, outcome: Outcome) -> None:
        self.seeds += 1
        self.epochs += outcome.epochs
        self.starts += outcome.starts
        self.deaths += outcome.deaths
        self.recoveries += outcome.recoveries
        self.virtual_s += outcome.virtual_s
        self.orders += outcome.orders
        self.refused += outcome.refused
        self.kills += outcome.kills
        if not outcome.ok:
            self.violations.append(outcome)

    def run(
        self, seeds: Iterable[int], *, jobs: int = 1, keep_stories: bool = False, storm: bool = False
    ) -> Iterator[Outcome]:
        """Run them, in so many processes, handing out each outcome as it comes."""
        began = time.monotonic()
        work = partial(simulate, keep_story=keep_stories, storm=storm)
        for outcome in map(work, seeds) if jobs == 1 else _in_processes(work, seeds, jobs):
            self.add(outcome)
            self.elapsed_s = time.monotonic() - began
            yield outcome

    def summary(self) -> str:
        said = (
            f"seeds: {self.seeds}, {self.seeds_per_s:.1f} a second; {self.epochs} epochs in {self.virtual_s:.0f} "
            f"virtual seconds, {self.starts} starts of the driver, {self.deaths} deaths, {self.recoveries} recoveries"
        )
        if self.orders:
            said += f", {self.orders} orders ({self.refused} refused), {self.kills} nodes killed"
        return f"{said}; violations: {len(self.violations) or 'none'}."

    def to_json(self) -> dict[str, Any]:
        return {
            "seeds": self.seeds,
            "seeds_per_s": round(self.seeds_per_s, 2),
            "elapsed_s": round(self.elapsed_s, 3),
            "virtual_s": round(self.virtual_s, 3),
            "epochs": self.epochs,
            "starts": self.starts,
            "deaths": self.deaths,
            "recoveries": self.recoveries,
            "orders": self.orders,
            "refused": self.refused,
            "kills": self.kills,
            "violations": [
                {
                    "seed": o.seed,
                    "checker": o.checker,
                    "message": o.message,
                    "replay": o.replay,
                    "digest": o.digest,
                    "story": list(o.story[-STORY_LINES:]),
                }
                for o in self.violations
            ],
        }


def _in_processes(work: Callable[[int], Outcome], seeds: Iterable[int], jobs: int) -> Iterator[Outcome]:
    """In the order of the seeds. Processes are new ones: a fork would take polars' threads along, halfway."""
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _leave_signals_to_the_parent)
    try:
        yield from pool.map(work, seeds, chunksize=8)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _leave_signals_to_the_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def show_campaign(
    campaign: Campaign, seeds: Sequence[int], console: Console, jobs: int = 1, storm: bool = False
) -> bool:
    """Run the seeds with a bar, violations as they come. True: Ctrl-C ended it early, in good order."""
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    bar = Progress(*columns, console=console, disable=not console.is_terminal, transient=True)
    with bar:
        task = bar.add_task("", total=len(seeds))
        try:
            for outcome in campaign.run(seeds, jobs=jobs, storm=storm):
                bar.update(task, advance=1, description=f"{campaign.seeds_per_s:.1f} seeds/s")
                if not outcome.ok:
                    said = f"seed {outcome.seed} violates {outcome.checker}: {outcome.message}"
                    console.print(said, style="red", markup=False, highlight=False, soft_wrap=True)
        except KeyboardInterrupt:
            return True
    return False


__all__ = ["STORY_LINES", "Campaign", "Outcome", "show_campaign", "simulate", "tell"]
