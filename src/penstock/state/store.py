"""Where checkpoints are kept: names, each with a whole value.

The protocol is small on purpose, so that a directory, an object store and a dictionary can all be a store. Every store
must promise two things. ``put`` is atomic: a reader sees the old value, the new value or none, and never a part of one.
``put_if_absent`` lets exactly one writer win. Real stores are in ``connectors/store.py``. Here are the two for tests.
"""

from __future__ import annotations

import errno
from typing import Protocol, runtime_checkable


@runtime_checkable
class Store(Protocol):
    """Names are relative, with ``/`` between parts. Values are whole."""

    def put(self, name: str, data: bytes) -> None:
        """Write or replace, atomically and durably."""

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Write unless the name exists. False: the name exists, and nothing changed."""

    def get(self, name: str) -> bytes:
        """The value. Raises FileNotFoundError if there is none."""

    def exists(self, name: str) -> bool: ...

    def list(self, prefix: str = "") -> list[str]:
        """Every name that begins with ``prefix``, sorted."""

    def delete(self, name: str) -> None:
        """Remove a name. A name that does not exist is no error, because deletion is often tried twice."""


class MemoryStore:
    """A store in a dictionary."""

    def __init__(self) -> None:
        self.items: dict[str, bytes] = {}

    def put(self, name: str, data: bytes) -> None:
        self.items[name] = bytes(data)

    def put_if_absent(self, name: str, data: bytes) -> bool:
        kept = bytes(bytearray(data))  # a new object: two writers with the same object must not both win
        return self.items.setdefault(name, kept) is kept

    def get(self, name: str) -> bytes:
        try:
            return self.items[name]
        except KeyError:
            raise FileNotFoundError(errno.ENOENT, "no such item", name) from None

    def exists(self, name: str) -> bool:
        return name in self.items

    def list(self, prefix: str = "") -> list[str]:
        return sorted(name for name in self.items if name.startswith(prefix))

    def delete(self, name: str) -> None:
        self.items.pop(name, None)


class FailingStore:
    """Passes every call on to ``inner`` until a write fails, as on a disk that is full or has gone.

    Write number ``fail_at`` (``put``, ``put_if_absent`` and ``delete``, counted from 1) raises OSError, and so does
    every later write. ``once``: later writes work again. ``after``: a failing write takes effect before its error, as
    when only the acknowledgement is lost."""

    def __init__(self, inner: Store, fail_at: int, *, once: bool = False, after: bool = False) -> None:
        self.inner = inner
        self.fail_at = fail_at
        self.once = once
        self.after = after
        self.writes = 0

    def _fails(self) -> bool:
        self.writes += 1
        return self.writes == self.fail_at or (self.writes > self.fail_at and not self.once)

    def _error(self, name: str) -> OSError:
        return OSError(errno.EIO, f"write {self.writes} fails on purpose", name)

    def put(self, name: str, data: bytes) -> None:
        fails = self._fails()
        if not fails or self.after:
            self.inner.put(name, data)
        if fails:
            raise self._error(name)

    def put_if_absent(self, name: str, data: bytes) -> bool:
        fails = self._fails()
        won = self.inner.put_if_absent(name, data) if not fails or self.after else False
        if fails:
            raise self._error(name)
        return won

    def get(self, name: str) -> bytes:
        return self.inner.get(name)

    def exists(self, name: str) -> bool:
        return self.inner.exists(name)

    def list(self, prefix: str = "") -> list[str]:
        return self.inner.list(prefix)

    def delete(self, name: str) -> None:
        fails = self._fails()
        if not fails or self.after:
            self.inner.delete(name)
        if fails:
            raise self._error(name)


__all__ = ["FailingStore", "MemoryStore", "Store"]
