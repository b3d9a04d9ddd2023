"""The state library: what a custom operator remembers about a key, used like plain Python.

A state is declared by annotating a parameter of ``on_event`` (or ``on_timer``)::

    def on_event(
        self,
        key: str,
        event: ps.Event,
        total: ps.Value[float],                                      # one value
        seen: Annotated[ps.Map[str, int], ps.expires("1h")],         # a dict whose entries are forgotten
        waiting: ps.Queue[Order],                                    # first in, first out
        latest: Annotated[ps.CountWindow[float], ps.keep(10)],       # the last ten values
        recent: Annotated[ps.TimeWindow[str], ps.keep("10m")],       # the values of the last ten minutes
        emit: ps.Emit,
    ) -> None: ...

Inside are ordinary Python objects; msgspec turns them into bytes when a checkpoint needs them, so users write no
serialisation code. A state that is emptied takes no room: when all states of a key are empty, the key is forgotten.

**One object for all keys.** ``seen`` above is the same ``Map`` at every call; what it holds is put in before a key's
events and taken out after them. So keep what is in it, never the ``Map`` itself.

**A value of numbers is columns.** A ``Value`` of a dataclass or Struct whose fields are all int, float or bool is kept
as numpy columns, not as objects: undo logs and checkpoints of it are vector operations, millions of keys cost the
garbage collector nothing, and objects exist only for the keys of the epoch at hand.

**Expiry follows the watermark at the row**, never the end of an epoch, so that what a key sees does not depend on how
its input was cut. Sweeping out what nobody asks for any more may happen later; nobody can tell.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, ValuesView
from datetime import UTC, date, datetime, timedelta, tzinfo
from typing import Any, Generic, TypeVar, overload

from penstock.errors import FlowError
from penstock.operators.base import FOREVER, NEVER
from penstock.operators.event_time import Duration, microseconds

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")
D = TypeVar("D")

_EPOCH = datetime(1970, 1, 1)
_EPOCH_UTC = datetime(1970, 1, 1, tzinfo=UTC)
_DATETIME_MAX_US = 253_402_300_799_999_999
_DATETIME_MIN_US = -62_135_596_800_000_000


# -- time ------------------------------------------------------------------------------------------------------------


def to_us(at: date) -> int:
    """Microseconds since 1970. A datetime without a zone is taken as UTC, as columns without a zone are."""
    if not isinstance(at, datetime):
        if not isinstance(at, date):
            raise TypeError(f"a time must be a datetime, not {type(at).__name__}")
        at = datetime(at.year, at.month, at.day)
    delta = at - (_EPOCH if at.tzinfo is None else _EPOCH_UTC)
    return (delta.days * 86_400 + delta.seconds) * 1_000_000 + delta.microseconds


def from_us(us: int, zone: tzinfo | None = None) -> datetime:
    us = min(max(us, _DATETIME_MIN_US), _DATETIME_MAX_US)
    at = (_EPOCH if zone is None else _EPOCH_UTC) + timedelta(microseconds=us)
    return at if zone is None else at.astimezone(zone)


class Time:
    """What time it is for the event, or the timer, at hand. Needs ``process(..., on=column)``."""

    __slots__ = ("_clock_ms", "_now", "_wake", "_watermark", "_zone")

    def __init__(self, zone: tzinfo | None = None, clock_ms: int = 0) -> None:
        self._watermark = NEVER
        self._now = NEVER
        """When a state written now counts as touched."""
        self._wake = FOREVER
        """When something of this key is due: a timer, an expiry. May be too early, never too late."""
        self._zone = zone
        self._clock_ms = clock_ms

    @property
    def watermark(self) -> datetime | None:
        """The watermark at this event: no earlier event is expected any more. In ``on_timer``: the timer's time.

        Depends on the input alone, so it is safe to compute with. None: nothing is known yet.
        """
        return None if self._watermark == NEVER else from_us(self._watermark, self._zone)

    @property
    def clock(self) -> datetime:
        """The clock on the wall when this epoch was planned, in UTC. It is logged: a replay sees the same.

        But it depends on when the input came and how it was cut into epochs: what is computed from it does, too.
        """
        return from_us(self._clock_ms * 1000, UTC)

    def _wake_by(self, at: int) -> None:
        if at < self._wake:
            self._wake = at


class Timers:
    """Calls to ``on_timer`` when the watermark passes a time. Kept as state; one set for each key.

    A timer with a name is the only one of that name: setting it again moves it. Timers without a name are told apart by
    their time.
    """

    __slots__ = ("_closing", "_firing", "_items", "_refuse", "_time")

    def __init__(self, time: Time, refuse: Callable[[int, str | None], None]) -> None:
        self._items: list[tuple[int, str | None]] = []
        """By time, then by when they were set."""
        self._time = time
        self._refuse = refuse
        self._closing = False
        self._firing = False
        """A timer is being called."""

    def set(self, at: date, name: str | None = None) -> None:
        """Call ``on_timer`` once the watermark has reached ``at``.

        A time that the watermark has passed already is not set: it becomes a dead letter, and is counted. One for the
        very watermark at an event fires as soon as the event has been handled; a timer cannot set one for its own time.
        """
        us = to_us(at)
        if us < self._time._watermark or (self._firing and us == self._time._watermark):
            self._refuse(us, name)
            return
        if self._closing:
            return
        items = self._items
        if name is not None:
            self.cancel(name)
        elif (us, None) in items:
            return
        items.insert(bisect_right(items, us, key=_at), (us, name))
        self._time._wake_by(us)

    def cancel(self, which: date | str) -> bool:
        """Forget the timer of this name, or the nameless one of this time. False: there is none."""
        items = self._items
        for i, (at, name) in enumerate(items):
            if name == which if isinstance(which, str) else name is None and at == to_us(which):
                del items[i]
                return True
        return False

    def clear(self) -> None:
        """Forget all timers of this key."""
        self._items.clear()

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[tuple[datetime, str | None]]:
        """(time, name), in the order in which they are due."""
        zone = self._time._zone
        return iter([(from_us(at, zone), name) for at, name in self._items])


def _at(item: tuple[int, str | None]) -> int:
    return item[0]


# -- declarations ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Expires:
    """See :func:`expires`."""

    after_us: int


@dataclasses.dataclass(frozen=True)
class Keep:
    """See :func:`keep`."""

    count: int | None
    span_us: int | None


def expires(after: Duration) -> Expires:
    """Forget what has not been written for so long, in event time: ``Annotated[ps.Value[int], ps.expires("1h")]``.

    Of a ``Map`` each entry is forgotten by itself; everything else as a whole. Needs ``process(..., on=column)``.
    """
    us = microseconds(after, "expires")
    if us <= 0:
        raise FlowError("expires must be longer than nothing.", remedy="For example ps.expires('1h').")
    return Expires(us)


def keep(size: int | str | timedelta) -> Keep:
    """How much a window keeps: so many values of a ``CountWindow``, so long of a ``TimeWindow``.

    ``Annotated[ps.CountWindow[float], ps.keep(10)]``, ``Annotated[ps.TimeWindow[float], ps.keep("10m")]``.
    """
    whole = isinstance(size, int) and not isinstance(size, bool)
    amount = size if isinstance(size, int) else microseconds(size, "keep")
    if amount <= 0:
        raise FlowError("a window must keep more than nothing.", remedy="For example ps.keep(10) or ps.keep('10m').")
    return Keep(amount, None) if whole else Keep(None, amount)


# -- structures ------------------------------------------------------------------------------------------------------


class Cell:
    """Common to all structures: what the key at hand has, and until when."""

    __slots__ = ("_after", "_data", "_due", "_time")
    _data: Any

    def __init__(self) -> None:
        self._data = None
        self._due = FOREVER
        self._after = 0
        self._time = _NO_TIME

    def _set_up(self, time: Time, after_us: int, keep: Keep | None) -> None:
        self._time = time
        self._after = after_us

    def _put(self, data: Any, due: int) -> None:
        """Hold what a key has."""
        self._data = data
        self._due = due

    def _take(self) -> Any:
        """What the key has now; None: nothing."""
        return self._data or None

    def _touch(self) -> None:
        if self._after:
            self._due = _later(self._due, self._time._now + self._after)
            self._time._wake_by(self._due)

    def _changed(self) -> None:
        """An empty structure is none, at once: an epoch may end here, and it must make no difference."""
        if self._data:
            self._touch()
        else:
            self._drop()

    def _expire(self, watermark: int) -> None:
        if self._due <= watermark:
            self._drop()

    def _drop(self) -> None:
        self._data = None
        self._due = FOREVER

    def _next_due(self) -> int:
        return self._due

    def clear(self) -> None:
        """Forget it for this key."""
        self._drop()


_NO_TIME = Time()


def _later(due: int, new: int) -> int:
    """A late event does not bring forward when something expires. ``FOREVER``: it had nothing to expire."""
    return new if due == FOREVER else max(due, new)


class Value(Cell, Generic[T]):
    """One value for each key: get, set, clear."""

    __slots__ = ()

    @overload
    def get(self) -> T | None: ...
    @overload
    def get(self, default: T) -> T: ...
    def get(self, default: T | None = None) -> T | None:
        """The value of this key, or the default when it has none."""
        return default if self._data is None else self._data

    def set(self, value: T) -> None:
        if value is None:
            raise ValueError("a state cannot be set to None; use clear()")
        self._data = value

    def delete(self) -> None:
        """The same as ``clear``."""
        self._drop()

    def _take(self) -> Any:
        return self._data


class ExpiringValue(Value[T]):
    """Apart, so that the common ``set`` is as short as it can be."""

    __slots__ = ()

    def set(self, value: T) -> None:
        super().set(value)
        self._touch()


class Map(Cell, Generic[K, V]):
    """A dict for each key: ``m[k] = v``, ``m[k]``, ``del m[k]``, ``k in m``, ``get``, ``set``, ``items`` ..."""

    __slots__ = ("_dues",)
    _data: dict[K, V] | None

    def __init__(self) -> None:
        super().__init__()
        self._dues: dict[K, int] = {}

    def _put(self, data: Any, due: int) -> None:
        self._due = due
        if self._after:
            self._data, self._dues = data or (None, {})
        else:
            self._data = data

    def _take(self) -> Any:
        if not self._after:
            return self._data or None
        return (self._data, self._dues) if self._data else None

    def _drop(self) -> None:
        super()._drop()
        self._dues = {}

    def _expire(self, watermark: int) -> None:
        if self._due > watermark or not self._data:
            return
        for k in [k for k, due in self._dues.items() if due <= watermark]:
            del self._data[k], self._dues[k]
        self._due = min(self._dues.values(), default=FOREVER)
        self._data = self._data or None

    def __setitem__(self, k: K, value: V) -> None:
        if self._data is None:
            self._data = {}
        self._data[k] = value
        if self._after:
            due = self._dues[k] = _later(self._dues.get(k, FOREVER), self._time._now + self._after)
            self._due = min(self._due, due)
            self._time._wake_by(due)

    def set(self, k: K, value: V) -> None:
        """The same as ``map[k] = value``."""
        self[k] = value

    def __getitem__(self, k: K) -> V:
        if self._data is None:
            raise KeyError(k)
        return self._data[k]

    @overload
    def get(self, k: K) -> V | None: ...
    @overload
    def get(self, k: K, default: V | D) -> V | D: ...
    def get(self, k: K, default: Any = None) -> Any:
        """The entry, or the default."""
        return default if self._data is None else self._data.get(k, default)

    def __delitem__(self, k: K) -> None:
        if self._data is None:
            raise KeyError(k)
        del self._data[k]
        self._dues.pop(k, None)
        if not self._data:
            self._drop()

    def pop(self, k: K, default: V | None = None) -> V | None:
        """Take an entry out; the default when there is none."""
        if self._data is None or k not in self._data:
            return default
        value = self._data[k]
        del self[k]
        return value

    def __contains__(self, k: object) -> bool:
        return self._data is not None and k in self._data

    def __len__(self) -> int:
        return len(self._data or ())

    def __iter__(self) -> Iterator[K]:
        return iter(self._data or ())

    def keys(self) -> KeysView[K]:
        return (self._data or {}).keys()

    def values(self) -> ValuesView[V]:
        return (self._data or {}).values()

    def items(self) -> ItemsView[K, V]:
        """In the order in which entries were first set."""
        return (self._data or {}).items()


class List(Cell, Generic[T]):
    """A list for each key: append, extend, index, iterate."""

    __slots__ = ()
    _data: list[T] | None

    def append(self, value: T) -> None:
        self.extend((value,))

    def extend(self, values: Iterable[T]) -> None:
        if self._data is None:
            self._data = []
        self._data.extend(values)
        self._changed()

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        return (self._data or [])[index]

    def __setitem__(self, index: int, value: T) -> None:
        if self._data is None:
            raise IndexError("the list is empty")
        self._data[index] = value
        self._touch()

    def __delitem__(self, index: int | slice) -> None:
        del (self._data if self._data is not None else [])[index]
        self._changed()

    def __len__(self) -> int:
        return len(self._data or ())

    def __iter__(self) -> Iterator[T]:
        return iter(self._data or ())

    def __contains__(self, value: object) -> bool:
        return value in (self._data or ())


class Queue(Cell, Generic[T]):
    """A queue for each key: what was pushed first is popped first."""

    __slots__ = ()
    _data: deque[T] | None

    def push(self, value: T) -> None:
        if self._data is None:
            self._data = deque()
        self._data.append(value)
        self._touch()

    def pop(self) -> T:
        """Take out the oldest. IndexError when there is none."""
        if not self._data:
            raise IndexError("pop from an empty queue")
        value = self._data.popleft()
        self._changed()
        return value

    def peek(self) -> T | None:
        """The oldest, or None."""
        return self._data[0] if self._data else None

    def __len__(self) -> int:
        return len(self._data or ())

    def __iter__(self) -> Iterator[T]:
        """From the oldest to the newest."""
        return iter(self._data or ())


class CountWindow(Cell, Generic[T]):
    """The last n values of each key: ``Annotated[ps.CountWindow[float], ps.keep(n)]``."""

    __slots__ = ("_count",)
    _data: deque[T] | None

    def _set_up(self, time: Time, after_us: int, keep: Keep | None) -> None:
        super()._set_up(time, after_us, keep)
        self._count = keep.count if keep else None

    def add(self, value: T) -> None:
        if self._data is None:
            self._data = deque()
        self._data.append(value)
        while len(self._data) > (self._count or 0):  # several when a shorter window found a longer one's state
            self._data.popleft()
        self._touch()

    @property
    def full(self) -> bool:
        """True once there are n values."""
        return len(self) == self._count

    def __getitem__(self, index: int) -> T:
        """0 is the oldest, -1 the newest."""
        return (self._data or ())[index]

    def __len__(self) -> int:
        return len(self._data or ())

    def __iter__(self) -> Iterator[T]:
        """From the oldest to the newest."""
        return iter(self._data or ())


class TimeWindow(Cell, Generic[T]):
    """The values of the last so long of each key: ``Annotated[ps.TimeWindow[str], ps.keep("10m")]``.

    It ends at the newest time in it, or at the watermark if that is later (with ``process(..., on=column)``), and keeps
    what is no older than that. Values are in order of their times, whatever the order they came in.
    """

    __slots__ = ("_span",)
    _data: tuple[list[int], list[T]] | None

    def _set_up(self, time: Time, after_us: int, keep: Keep | None) -> None:
        super()._set_up(time, after_us, keep)
        self._span = (keep.span_us if keep else None) or 0

    def _next_due(self) -> int:
        """With a watermark, a window that nobody writes to empties by itself."""
        ends = self._data[0][-1] + self._span + 1 if self._data and self._time is not _NO_TIME else FOREVER
        return min(self._due, ends)

    def _expire(self, watermark: int) -> None:
        if self._next_due() <= watermark:
            self._drop()

    def _prune(self) -> tuple[list[int], list[T]]:
        if self._data is None:
            return [], []
        times, values = self._data
        oldest = max(times[-1], self._time._watermark) - self._span
        if times[0] < oldest:
            gone = bisect_left(times, oldest)
            del times[:gone], values[:gone]
            if not times:
                self._drop()
        return times, values

    def add(self, time: date, value: T) -> None:
        """Add a value. One that is older than the window reaches is forgotten at once."""
        at = to_us(time)
        if self._data is None:
            self._data = ([], [])
        times, values = self._data
        place = bisect_right(times, at)
        times.insert(place, at)
        values.insert(place, value)
        self._touch()
        self._prune()
        self._time._wake_by(self._next_due())

    def items(self) -> list[tuple[datetime, T]]:
        """(time, value), oldest first."""
        times, values = self._prune()
        zone = self._time._zone
        return [(from_us(at, zone), value) for at, value in zip(times, values, strict=True)]

    def __getitem__(self, index: int) -> T:
        """0 is the oldest, -1 the newest."""
        return self._prune()[1][index]

    def __len__(self) -> int:
        return len(self._prune()[1])

    def __iter__(self) -> Iterator[T]:
        """Values, oldest first."""
        return iter(self._prune()[1])


__all__ = [
    "Cell",
    "CountWindow",
    "Expires",
    "ExpiringValue",
    "Keep",
    "List",
    "Map",
    "Queue",
    "Time",
    "TimeWindow",
    "Timers",
    "Value",
    "expires",
    "from_us",
    "keep",
    "to_us",
]
