"""Virtual time: a heap of things that will happen, and thread pools whose threads are entries of that heap.

Nothing here ever waits. ``Schedule.run`` takes the next entry, moves the clock to it, and calls it; two runs with the
same random numbers are the same run.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any


class Schedule:
    """What happens when. Entries of one instant happen in the order in which they were made."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._made = 0

    def clock(self) -> float:
        return self.now

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        assert seconds >= 0
        self._made += 1
        heapq.heappush(self._heap, (self.now + seconds, self._made, what))

    def next(self) -> Callable[[], None] | None:
        """Moves the clock to the next entry and hands it out; None when nothing will ever happen again."""
        if not self._heap:
            return None
        self.now, _, what = heapq.heappop(self._heap)
        return what


class SimFuture(Future[Any]):
    """A future of a ``SimPool``. Who waits for it has it done at once: one thread cannot wait for itself."""

    def __init__(self, pool: SimPool, work: Callable[[], Any]) -> None:
        super().__init__()
        self._pool = pool
        self._work = work

    def perform(self) -> None:
        try:
            result = self._work()
        except Exception as error:
            self.set_exception(error)
        else:
            self.set_result(result)

    def result(self, timeout: float | None = None) -> Any:
        self._pool.hurry(self)
        return super().result(0)


class SimPool(Executor):
    """A pool of one thread: work is done in order, each after ``delay()`` seconds of virtual time."""

    def __init__(self, schedule: Schedule, delay: Callable[[], float], held: Callable[[], float] = lambda: 0.0) -> None:
        """``held``: for how long work cannot begin, as its first step would wait for something that is away."""
        self._schedule = schedule
        self._delay = delay
        self._held = held
        self._queue: deque[SimFuture] = deque()
        self._busy = False
        self._closed = False

    def clock(self) -> float:
        return self._schedule.now

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> SimFuture:
        future = SimFuture(self, lambda: fn(*args, **kwargs))
        if not self._closed:
            self._queue.append(future)
            self._kick()
        return future

    def hurry(self, future: SimFuture) -> None:
        """Do everything up to this future now."""
        while not future.done() and self._queue:
            self._queue.popleft().perform()
        assert future.done(), "a future that nobody will ever complete was waited for"

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """What has begun is finished, as a thread would; what waits is done as well, unless it is cancelled."""
        self._closed = True
        if wait and self._queue and self._busy:
            self._queue.popleft().perform()
        while wait and self._queue and not cancel_futures:
            self._queue.popleft().perform()
        self._queue.clear()

    def die(self) -> None:
        """The process is gone."""
        self._closed = True
        self._queue.clear()

    def _kick(self) -> None:
        if self._queue and not self._busy:
            self._busy = True
            self._schedule.after(self._delay(), self._do_one)

    def _do_one(self) -> None:
        held = self._held() if self._queue else 0.0
        if held > 0:
            self._schedule.after(held, self._do_one)
            return
        self._busy = False
        if self._queue:
            try:
                self._queue.popleft().perform()
            finally:
                self._kick()


__all__ = ["Schedule", "SimFuture", "SimPool"]
