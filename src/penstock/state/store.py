"""Where checkpoints are kept: a flat space of names with whole values.

The protocol is small on purpose, so that a directory, an object store or a dictionary can all be one. What every store
must give: ``put`` is atomic (a reader sees the old value, the new one, or none, and never a part), and
``put_if_absent`` lets exactly one writer win. Real stores live in ``connectors/store.py``; here are the two that tests
need.
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
        """Write unless the name exists. False: it does, and nothing changed."""

    def get(self, name: str) -> bytes:
        """The value, or FileNotFoundError."""

    def exists(self, name: str) -> bool: ...

    def list(self, prefix: str = "") -> list[str]:
        """Every name that begins with ``prefix``, sorted."""

    def delete(self, name: str) -> None:
        """Remove. A name that is not there is no error: deletion is often tried twice."""


class MemoryStore:
    """A dictionary."""

    def __init__(self) -> None:
        self.items: dict[str, bytes] = {}

    def put(self, name: str, data: bytes) -> None:
        self.items[name] = bytes(data)

    def put_if_absent(self, name: str, data: bytes) -> bool:
        kept = bytes(bytearray(data))  # an object of its own, or who came second with the same one would win too
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
    """Passes everything on to ``inner``, but its ``fail_at``-th write (``put``, ``put_if_absent`` or ``delete``,
    counted from 1) and all later ones raise OSError: what a full or vanished disk looks like. ``once``: later ones
    work again. ``after``: the failing write takes effect before the error, as when only the acknowledgement is lost."""

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
