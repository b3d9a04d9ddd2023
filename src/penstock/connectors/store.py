"""Checkpoint stores on a disk or any address that fsspec knows, and the lock that keeps a second job out.

On a local disk a write goes to a temporary name, is flushed to the device, and is renamed: after a power cut a name
has its old value, its new one, or none. Object stores replace whole objects by themselves. Network file systems with
renames (HDFS, SFTP, SMB) get a temporary name and a rename as well.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import uuid
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, Final

import fsspec

from penstock.errors import CheckpointError, CheckpointInUse, StorageFull

LOCK_NAME: Final = "LOCK"

Names = list[str]
"""Within FsspecStore the word ``list`` is a method."""

_TEMPORARY: Final = ".tmp"
_RENAMING: Final = frozenset({"hdfs", "webhdfs", "sftp", "ssh", "smb"})
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_FORBIDDEN: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_MISSING: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR})


class FsspecStore:
    """A directory at a local path or an fsspec address (``s3://bucket/dir``, ``memory://x`` ...). Picklable.

    ``sync=False`` skips the flush to the device: for files that can be made again. ``put_if_absent`` is exclusive on
    local disks and wherever the fsspec implementation creates conditionally (S3, GCS, Azure); on others two writers at
    the same instant may both believe they won."""

    def __init__(self, url: str, *, sync: bool = True, storage_options: Mapping[str, Any] | None = None) -> None:
        self.url = url
        self.sync = sync
        self.storage_options = dict(storage_options or {})
        self.root = local_path(url)
        self._opened: tuple[Any, str] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_opened": None}

    def __repr__(self) -> str:
        return f"FsspecStore({self.url!r})"

    def path(self, name: str) -> str:
        """The full address of a name, for messages."""
        assert name and not name.startswith("/") and ".." not in name.split("/"), f"not a name in a store: {name!r}"
        return os.path.join(self.root, name) if self.root is not None else f"{self.url.rstrip('/')}/{name}"

    def put(self, name: str, data: bytes, *, sync: bool | None = None) -> None:
        path = self.path(name)
        with _explained(path):
            if self.root is None:
                self._put_remote(name, data)
                return
            durable = self.sync if sync is None else sync
            with _temporary_file(path, data, durable) as temporary:
                os.replace(temporary, path)
            if durable:
                _sync_directory(os.path.dirname(path))

    def put_if_absent(self, name: str, data: bytes) -> bool:
        path = self.path(name)
        with _explained(path):
            if self.root is None:
                return self._create_remote(name, data)
            with _temporary_file(path, data, self.sync) as temporary:
                try:
                    # A link is exclusive and shows the whole file at once; O_EXCL on the name itself would show a part.
                    os.link(temporary, path)
                except FileExistsError:
                    return False
                except OSError as error:
                    if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EMLINK):
                        raise
                    if not _create_exclusively(path, data):  # a file system without links
                        return False
            if self.sync:
                _sync_directory(os.path.dirname(path))
            return True

    def get(self, name: str) -> bytes:
        path = self.path(name)
        with _explained(path, reading=True):
            if self.root is not None:
                with open(path, "rb") as file:
                    return file.read()
            fs, _ = self._remote()
            data: bytes = fs.cat_file(self._remote_path(name))
            return data

    def exists(self, name: str) -> bool:
        path = self.path(name)
        with _explained(path):
            return (
                os.path.isfile(path)
                if self.root is not None
                else bool(self._remote()[0].isfile(self._remote_path(name)))
            )

    def delete(self, name: str) -> None:
        path = self.path(name)
        with _explained(path), contextlib.suppress(FileNotFoundError):
            if self.root is not None:
                os.unlink(path)
            else:
                self._remote()[0].rm_file(self._remote_path(name))

    def remove_temporaries(self) -> int:
        """Remove what killed writers left half-written. Only while no writer is at work: at a job's start, under its
        lock."""
        with _explained(self.url):
            found = self._list_local("") if self.root is not None else self._list_remote("")
            left = [name for name in found if _is_temporary(name)]
        for name in left:
            self.delete(name)
        return len(left)

    def _list_local(self, folder: str) -> Names:
        assert self.root is not None
        names = []
        for directory, _, files in os.walk(os.path.join(self.root, folder)):
            base = os.path.relpath(directory, self.root)
            names += files if base == "." else [f"{base}/{file}".replace(os.sep, "/") for file in files]
        return names

    def _list_remote(self, folder: str) -> Names:
        fs, root = self._remote()
        fs.invalidate_cache()
        try:
            paths = fs.find(f"{root}/{folder}" if folder else root)
        except FileNotFoundError:
            return []
        start = len(root) + 1
        return [path[start:] for path in paths if path.startswith(f"{root}/")]

    def _remote(self) -> tuple[Any, str]:
        if self._opened is None:
            fs, root = fsspec.core.url_to_fs(self.url, **self.storage_options)
            self._opened = fs, root.rstrip("/")
        return self._opened

    def _remote_path(self, name: str) -> str:
        return f"{self._remote()[1]}/{name}"

    def _put_remote(self, name: str, data: bytes) -> None:
        fs, _ = self._remote()
        path = self._remote_path(name)
        protocols = {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)
        if not protocols & _RENAMING:
            fs.pipe_file(path, data)
            return
        folder, _, base = path.rpartition("/")
        temporary = f"{folder}/{_temporary_name(base)}"
        fs.makedirs(folder, exist_ok=True)
        fs.pipe_file(temporary, data)
        if fs.exists(path):
            fs.rm_file(path)
        fs.mv(temporary, path)

    def _create_remote(self, name: str, data: bytes) -> bool:
        fs, _ = self._remote()
        try:
            fs.pipe_file(self._remote_path(name), data, mode="create")
        except FileExistsError:
            return False
        return True

    def list(self, prefix: str = "") -> Names:
        """Names that begin with ``prefix``. Temporary files and the lock are not names."""
        folder = prefix.rpartition("/")[0]
        with _explained(self.url):
            found = self._list_local(folder) if self.root is not None else self._list_remote(folder)
        wanted = (name for name in found if name.startswith(prefix) and name != LOCK_NAME)
        return sorted(name for name in wanted if not _is_temporary(name))


class DirectoryLock:
    """One live job for each checkpoint directory.

    Local directories: an ``flock`` on ``<dir>/LOCK``. The kernel holds it for this process and drops it however the
    process dies, SIGKILL included; the file's text says who holds it. (On NFS it works as far as the server implements
    flock.)

    Other stores have no such thing: there it is a *lease*, a file with owner and heartbeat. ``heartbeat(now_s)`` must
    be called well within ``lease_s``; a lease whose heartbeat is older is taken over. Its limits: clocks of the two
    hosts must agree to much less than ``lease_s``; a job that is frozen for longer than that loses its lease and finds
    out only at its next heartbeat; and two jobs that take over an expired lease in the same instant are told apart
    only if the store lists its last writer consistently. The attempt number in manifests and ``put_if_absent`` remain
    the last line of defence.
    """

    def __init__(
        self,
        store: FsspecStore | str,
        *,
        job: str = "",
        started: str = "",
        lease_s: float = 60.0,
        now_s: float | None = None,
    ) -> None:
        self.store = FsspecStore(store) if isinstance(store, str) else store
        self.lease_s = lease_s
        self._owner = {"pid": os.getpid(), "host": socket.gethostname(), "job": job, "started": started}
        self._token = uuid.uuid4().hex
        self._descriptor: int | None = None
        self._leased = False
        self._acquire(now_s)

    def __enter__(self) -> DirectoryLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    @property
    def held(self) -> bool:
        return self._descriptor is not None or self._leased

    def heartbeat(self, now_s: float) -> None:
        """Renew a lease; raises CheckpointInUse when another job has taken it. Nothing to do for a local lock."""
        if not self._leased:
            return
        holder = self._read_lease()
        if holder is None or holder.get("token") != self._token:
            self._leased = False
            raise _in_use(self.store.url, holder or {})
        self.store.put(LOCK_NAME, self._lease(now_s))

    def release(self) -> None:
        """Let the next job in. The file itself stays: to remove it would race with whoever opens it now."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            _locked.discard(self)
            os.ftruncate(descriptor, 0)
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)
        elif self._leased:
            self._leased = False
            if (self._read_lease() or {}).get("token") == self._token:
                self.store.delete(LOCK_NAME)

    def _acquire(self, now_s: float | None) -> None:
        if self.store.root is not None:
            self._acquire_local(self.store.root)
            return
        assert now_s is not None, "a lease needs the time"
        if not self.store.put_if_absent(LOCK_NAME, self._lease(now_s)):
            holder = self._read_lease() or {}
            if now_s - float(holder.get("heartbeat_s", 0.0)) <= self.lease_s:
                raise _in_use(self.store.url, holder)
            self.store.put(LOCK_NAME, self._lease(now_s))
            winner = self._read_lease() or {}
            if winner.get("token") != self._token:
                raise _in_use(self.store.url, winner)
        self._leased = True

    def _acquire_local(self, root: str) -> None:
        path = os.path.join(root, LOCK_NAME)
        with _explained(path):
            _make_directories(root)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = _parse(os.read(descriptor, 65536))
                os.close(descriptor)
                raise _in_use(root, holder) from None
            except OSError:
                os.close(descriptor)
                raise
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(self._owner).encode() + b"\n", 0)
        self._descriptor = descriptor
        _locked.add(self)

    def _lease(self, now_s: float) -> bytes:
        return json.dumps(self._owner | {"token": self._token, "heartbeat_s": now_s}).encode()

    def _read_lease(self) -> dict[str, Any] | None:
        try:
            return _parse(self.store.get(LOCK_NAME))
        except FileNotFoundError:
            return None

    def _close_in_child(self) -> None:
        # A forked child shares the lock; if it outlived its parent, the directory would stay locked by nobody's job.
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


_locked: weakref.WeakSet[DirectoryLock] = weakref.WeakSet()


def _after_fork() -> None:
    for lock in list(_locked):
        lock._close_in_child()


os.register_at_fork(after_in_child=_after_fork)


def local_path(url: str) -> str | None:
    """The absolute path of a local address, or None for any other."""
    scheme, separator, rest = url.partition("://")
    if separator and scheme in ("file", "local"):
        return os.path.abspath(rest)
    return None if separator else os.path.abspath(url.removeprefix("file:"))


def _in_use(where: str, holder: Mapping[str, Any]) -> CheckpointInUse:
    job = f"job {holder['job']!r}, " if holder.get("job") else ""
    since = f", since {holder['started']}" if holder.get("started") else ""
    who = f"{job}process {holder.get('pid', '?')} on {holder.get('host', 'an unknown host')}{since}"
    return CheckpointInUse(
        f"Checkpoint directory {where} is in use by another job: {who}.",
        remedy="Stop that job first, or give this one a checkpoint directory of its own.",
        path=where,
        holder=dict(holder),
    )


def _parse(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


@contextlib.contextmanager
def _explained(path: str, *, reading: bool = False) -> Iterator[None]:
    """Errors of the world in our words. FileNotFoundError of a read means "absent" and passes, as do unknown errors."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise StorageFull(
                f"No room left to write {path}.",
                remedy="Free some space or raise the quota; the job goes on from its last checkpoint.",
                path=path,
            ) from error
        if error.errno in _FORBIDDEN:
            raise CheckpointError(
                f"{path} may not be {'read' if reading else 'written'} ({os.strerror(error.errno)}).",
                remedy="Give this user access to the checkpoint directory, or choose another one.",
                path=path,
            ) from error
        if error.errno in _MISSING and not reading:
            raise CheckpointError(
                f"{path} cannot be used ({os.strerror(error.errno)}).",
                remedy="Check that the checkpoint directory is a directory, and that its device is mounted.",
                path=path,
            ) from error
        raise


def _temporary_name(base: str) -> str:
    return f".{base}.{uuid.uuid4().hex}{_TEMPORARY}"


def _is_temporary(name: str) -> bool:
    base = name.rpartition("/")[2]
    return base.startswith(".") and base.endswith(_TEMPORARY)


@contextlib.contextmanager
def _temporary_file(path: str, data: bytes, durable: bool) -> Iterator[str]:
    """A written file beside ``path``; gone at the end unless renamed."""
    folder, base = os.path.split(path)
    temporary = os.path.join(folder, _temporary_name(base))
    try:
        file = open(temporary, "xb")
    except FileNotFoundError:
        _make_directories(folder)
        file = open(temporary, "xb")
    try:
        with file:
            file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        yield temporary
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def _create_exclusively(path: str, data: bytes) -> bool:
    try:
        with open(path, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError:
        return False
    return True


def _make_directories(folder: str) -> None:
    """Make missing directories, and flush the entries of those made: a file in an unflushed directory is lost too."""
    if os.path.isdir(folder):
        return
    parent = os.path.dirname(folder)
    if parent != folder:
        _make_directories(parent)
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder)
        _sync_directory(parent)


def _sync_directory(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


__all__ = ["LOCK_NAME", "DirectoryLock", "FsspecStore", "local_path"]
