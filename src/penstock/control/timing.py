"""How far event time has come for a stage, epoch by epoch: from the reports of the stages upstream, and nothing else.

A watermark at time t says that what comes later and is not late has a time of at least t. The watermark *at a row* is
worked out by the tasks; here is what they cannot know, the greatest time of the tasks before them, and the watermark of
the whole epoch, which closes windows. It is the least over all inputs of a stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from penstock.control.records import FOREVER, NEVER
from penstock.control.topology import StageInfo, at_port
from penstock.ids import StageId


class Seen(Protocol):
    """A task's report, as far as time goes."""

    @property
    def time_max(self) -> Mapping[str, int]: ...


@dataclass(frozen=True)
class Time:
    """What a stage is told of time for one epoch."""

    before: int
    watermark: int
    arrivals: dict[str, list[int]] = field(default_factory=dict)
    """origin without time -> watermark of that input before each of its tasks"""
    ports: tuple[tuple[int, int], ...] = ()
    """With several inputs: watermark before and after, of each."""
    clocks: dict[str, int] = field(default_factory=dict)
    """What to remember: edge -> greatest event time up to this epoch; "@stage#port" -> watermark of an input"""


def time_of(
    stage: StageInfo,
    upstream: Mapping[StageId, StageInfo],
    clocks_before: Mapping[str, int],
    before: int,
    watermarks: Mapping[StageId, int],
    reports: Mapping[StageId, Sequence[Seen]],
    *,
    final: bool,
    clock_ms: int,
) -> Time:
    """``before`` is the stage's watermark at the end of the epoch before, ``watermarks`` those of stages upstream at
    the end of this one, ``reports`` those of their tasks in order. ``final``: no input follows this epoch.
    """
    if not stage.timed:
        return Time(NEVER, NEVER)
    if stage.clocked:
        return Time(before, max(before, FOREVER if final else clock_ms * 1000))
    clocks: dict[str, int] = {}
    by_port: dict[int, int] = {}
    arrivals: dict[str, list[int]] = {}
    for up, port in stage.inputs:
        here = at_port(stage.id, port)
        edge = f"{up}>{here}"
        seen = clocks_before.get(edge, NEVER)
        prefix: list[int] = []
        for report in reports[up]:
            prefix.append(behind(seen, stage.lateness_us))
            seen = max(seen, report.time_max.get(here, NEVER))
        clocks[edge] = seen
        info = upstream[up]
        if info.timed:
            mark = behind(watermarks[up], info.hold_us + stage.lateness_us)
        else:
            arrivals[at_port(up, port)] = prefix
            mark = FOREVER if final else behind(seen, stage.lateness_us)
        by_port[port] = min(mark, by_port.get(port, FOREVER))
    ports: list[tuple[int, int]] = []
    for port, mark in sorted(by_port.items()) if len(by_port) > 1 else ():
        name = f"@{at_port(stage.id, port)}"
        earlier = clocks_before.get(name, NEVER)
        clocks[name] = max(earlier, mark)
        ports.append((earlier, clocks[name]))
    return Time(before, max(before, min(by_port.values())), arrivals, tuple(ports), clocks)


def behind(time: int, by: int) -> int:
    """The time that lies ``by`` before a time. The ends of time stay where they are."""
    return time if time in (NEVER, FOREVER) else time - by


__all__ = ["Seen", "Time", "behind", "time_of"]
