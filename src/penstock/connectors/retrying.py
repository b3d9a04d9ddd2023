"""A store that is away for a while: time-outs, bounded retries, and patience up to a limit the user sets.

Between a job and an object store lies a network. An operation may fail for a moment, hang, or be done although its
answer was lost. This wrapper makes three promises:

* no operation takes for ever: each try has a time-out;
* an error that may pass is tried again, a bounded number of times, with growing pauses and chance in them, so that
  many workers do not come back in step. An error that will not pass by itself (no permission, no bucket, no room, no
  credentials) is raised at once, in our words;
* what the job needs in order to be *exact* (reads and writes) is tried for longer, until the store has been away for
  ``away_s``: such calls sit in background threads, and processing goes on meanwhile. Deletions and listings are not
  worth that: garbage is collected at the next checkpoint.

Why trying again is harmless: every name is written with one content only, or by one writer after the other. A try
that timed out may still take effect, before or after the next try; both write the same bytes. What must not be
overwritten by a late try of a dead process (the epoch log, segments of a spool) is created with ``put_if_absent``.
There, a lost answer shows as "exists already", so the content is read back and compared.
"""

from __future__ import annotations

import errno
import random
import threading
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

from penstock.errors import PenstockError, StoreAway
from penstock.state.store import Store

T = TypeVar("T")

PAUSE_S: Final = 0.1
PAUSE_S_MAX: Final = 5.0
HUNG_MAX: Final = 16
"""The most tries that may have timed out without their threads having come back. With this many, the store counts as
away without being asked."""

_PERMANENT: Final = (
    PenstockError,
    FileNotFoundError,
    FileExistsError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
)
_PERMANENT_ERRNO: Final = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENAMETOOLONG, errno.EINVAL, errno.EFBIG, errno.ENOSYS}
)
_NETWORK_MODULES: Final = ("aiohttp.", "urllib3.", "requests.")
_BOTO_TRANSIENT: Final = frozenset(
    {
        "EndpointConnectionError",
        "ConnectionClosedError",
        "ConnectionError",
        "ConnectTimeoutError",
        "ReadTimeoutError",
        "HTTPClientError",
        "IncompleteReadError",
        "ResponseStreamingError",
        "ProxyConnectionError",
    }
)
_CODES_TRANSIENT: Final = frozenset(
    {
        "SlowDown",
        "Throttling",
        "ThrottlingException",
        "RequestLimitExceeded",
        "RequestTimeout",
        "IncompleteBody",
        "BadDigest",
        "InternalError",
        "ServiceUnavailable",
        "OperationAborted",
    }
)


def transient(error: BaseException) -> bool:
    """May this error pass by itself?

    Errors of botocore and of HTTP clients are told by their names, since none of these packages need be there.
    """
    if isinstance(error, _PERMANENT):
        return False
    if error.__cause__ is not None and _service_is_busy(error.__cause__):
        return True
    if isinstance(error, OSError):
        return error.errno not in _PERMANENT_ERRNO
    module, name = f"{type(error).__module__}.", type(error).__name__
    if module.startswith(("botocore.", "aiobotocore.")):
        return name in _BOTO_TRANSIENT or _service_is_busy(error)
    return module.startswith(_NETWORK_MODULES)


def _service_is_busy(error: BaseException) -> bool:
    response: Any = getattr(error, "response", None) or {}
    code = str(response.get("Error", {}).get("Code", ""))
    status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    return code in _CODES_TRANSIENT or status == 429 or status >= 500


class RetryingStore:
    """See the module. Picklable; the watcher and the clocks stay behind: a worker is patient by itself.

    ``watch(away, reason)`` is told when an operation has used up its quick retries, and again when one has gone
    through. ``guard`` is called before each patient try of a write: it renews the hold on the directory, or raises if
    another job has taken it meanwhile.
    """

    def __init__(
        self,
        inner: Store,
        *,
        where: str = "",
        retries: int = 5,
        timeout_s: float = 30.0,
        away_s: float = 120.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Any] | None = None,
        chance: Callable[[], float] | None = None,
    ) -> None:
        self.inner = inner
        self.where = where or getattr(inner, "url", "")
        self.retries = retries
        self.timeout_s = timeout_s
        self.away_s = away_s
        self.watch: Callable[[bool, str], None] = _nobody
        self.guard: Callable[[], None] = _nothing
        self._clock = clock
        self._chance = chance or random.Random().random  # never the process's own, which users may have seeded
        self._reset()
        self._sleep = sleep or self._over.wait

    def abandon(self) -> None:
        """Be patient no more: the job is over. Whoever waits for the store is told so at once."""
        self._over.set()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._hung = 0
        self._away: set[int] = set()
        """Threads that wait for the store to come back."""

    def __getstate__(self) -> dict[str, Any]:
        kept = ("inner", "where", "retries", "timeout_s", "away_s")
        return {name: getattr(self, name) for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def __repr__(self) -> str:
        return f"RetryingStore({self.inner!r})"

    # -- the operations ------------------------------------------------------------------------------------------

    def put(self, name: str, data: bytes) -> None:
        self._do(f"write {name}", lambda: self.inner.put(name, data), patient=True, guarded=True)

    def put_if_absent(self, name: str, data: bytes) -> bool:
        tries = 0

        def create() -> bool:
            nonlocal tries
            tries += 1
            won = self.inner.put_if_absent(name, data)
            # After a failed try, "it is there" may mean that the try did its work and only the answer was lost.
            return won or (tries > 1 and self.inner.get(name) == data)

        return self._do(f"create {name}", create, patient=True, guarded=True)

    def get(self, name: str) -> bytes:
        return self._do(f"read {name}", lambda: self.inner.get(name), patient=True)

    def exists(self, name: str) -> bool:
        return self._do(f"look for {name}", lambda: self.inner.exists(name))

    def list(self, prefix: str = "") -> list[str]:
        return self._do(f"list {prefix}", lambda: self.inner.list(prefix))

    def delete(self, name: str) -> None:
        self._do(f"delete {name}", lambda: self.inner.delete(name))

    # -- trying --------------------------------------------------------------------------------------------------

    def _do(self, what: str, operation: Callable[[], T], *, patient: bool = False, guarded: bool = False) -> T:
        began = self._clock()
        tries = 0
        try:
            while True:
                try:
                    if guarded and tries > self.retries:
                        self.guard()
                    result = self._timed(what, operation)
                except Exception as error:
                    if not transient(error):
                        raise
                    tries += 1
                    reason = f"{type(error).__name__}: {error}"
                    if tries > self.retries:
                        self._is_away(reason)
                        away = self._clock() - began
                        if not patient or away >= self.away_s or self._over.is_set():
                            raise self._given_up(what, tries, away, reason) from error
                    pause = min(PAUSE_S_MAX, PAUSE_S * 2 ** min(tries - 1, 10)) * (0.5 + self._chance() / 2)
                    # One last try when the time is over, not one pause later.
                    left = self.away_s - (self._clock() - began)
                    self._sleep(max(0.0, min(pause, left)) if tries > self.retries else pause)
                else:
                    return result
        finally:
            self._is_back()

    def _given_up(self, what: str, tries: int, away_s: float, reason: str) -> StoreAway:
        return StoreAway(
            f"the store {self.where} did not answer: could not {what} in {tries} tries and {away_s:.0f} s ({reason}).",
            remedy="Nothing is half-written: start again with the same checkpoint once the store is back. "
            "store_away_s says how long a job goes on without it.",
            path=self.where,
            tries=tries,
        )

    def _is_away(self, reason: str) -> None:
        me = threading.get_ident()
        with self._lock:
            first = not self._away
            self._away.add(me)
        if first:
            self.watch(True, reason)

    def _is_back(self) -> None:
        me = threading.get_ident()
        with self._lock:
            last = self._away == {me}
            self._away.discard(me)
        if last:
            self.watch(False, "")

    def _timed(self, what: str, operation: Callable[[], T]) -> T:
        """The operation in a thread of its own, because no file system lets itself be interrupted. A thread that hangs
        is left behind; it ends with its system call or with the process.
        """
        if self.timeout_s <= 0:
            return operation()
        with self._lock:
            if self._hung >= HUNG_MAX:
                raise TimeoutError(errno.ETIMEDOUT, f"{self._hung} operations hang already")
        outcome: list[tuple[bool, Any]] = []
        late = False
        done = threading.Event()

        def work() -> None:
            try:
                outcome.append((True, operation()))
            except BaseException as error:
                outcome.append((False, error))
            done.set()
            with self._lock:
                if late:
                    self._hung -= 1

        threading.Thread(target=work, name=f"penstock-store: {what}", daemon=True).start()
        if not done.wait(self.timeout_s):
            with self._lock:
                if not done.is_set():
                    late = True
                    self._hung += 1
                    raise TimeoutError(errno.ETIMEDOUT, f"no answer within {self.timeout_s:g} s", what)
        fine, value = outcome[0]
        if fine:
            return value  # type: ignore[no-any-return]
        raise value


def _nobody(away: bool, reason: str) -> None:
    """Nobody watches."""


def _nothing() -> None:
    """Nothing to guard."""


__all__ = ["RetryingStore", "transient"]
