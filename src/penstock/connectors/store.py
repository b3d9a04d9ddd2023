"""Checkpoint stores on a disk or any address that fsspec knows, and the lock that keeps a second job out.

On a local disk a write goes to a temporary name, is flushed to the device, and is renamed: after a power cut a name
has its old value, its new one, or none. Object stores replace whole objects by themselves, and S3 can create one only
if it is absent, or replace one only if it is still what it was, which the lock needs. Network file systems with renames
(HDFS, SFTP, SMB) get a temporary name and a rename as well. What to do about errors that pass is said in
``retrying.py``.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO, Final

import fsspec
import psutil

from penstock.errors import CheckpointError, CheckpointInUse, StorageFull

LOCK_NAME: Final = "LOCK"

Names = list[str]
"""Within FsspecStore the word ``list`` is a method."""

DIRECTORY_MODE: Final = 0o700
FILE_MODE: Final = 0o600
"""What is made on a local disk is for its owner alone: state is users' data, and who can write it changes results."""

_TEMPORARY: Final = ".tmp"
FLUSH_BYTES: Final = 8 << 20
"""So much of a large file is written before it is flushed: some hundredths of a second of a disk."""
_RENAMING: Final = frozenset({"hdfs", "webhdfs", "sftp", "ssh", "smb"})
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_FORBIDDEN: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_S3: Final = frozenset({"s3", "s3a"})
_NO_S3_PACKAGE: Final = "Addresses of S3 need the package s3fs: pip install 'penstock[s3]'."
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
        self._opened: tuple[int, Any, str] | None = None

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
        """Remove the half-written files of killed writers. Call this only while nobody writes: at a job's start, under
        its lock. Returns how many there were."""
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
        # A forked child needs a connection, and a thread that serves it, of its own.
        if self._opened is None or self._opened[0] != os.getpid():
            defaults = _s3_defaults() if self.url.partition("://")[0] in _S3 else {}
            try:
                fs, root = fsspec.core.url_to_fs(self.url, **{**defaults, **self.storage_options})
            except ImportError as error:
                raise CheckpointError(
                    f"{self.url} cannot be reached: {error}.",
                    remedy=_NO_S3_PACKAGE if defaults else "Install the package that fsspec names.",
                    path=self.url,
                ) from error
            except ValueError as error:
                raise CheckpointError(
                    f"{self.url} is no address that fsspec knows: {error}.",
                    remedy="Give a directory, or an address such as s3://bucket/dir.",
                    path=self.url,
                ) from error
            self._opened = os.getpid(), fs, root.rstrip("/")
        return self._opened[1:]

    def _remote_path(self, name: str) -> str:
        return f"{self._remote()[1]}/{name}"

    def _put_remote(self, name: str, data: bytes) -> None:
        fs, _ = self._remote()
        path = self._remote_path(name)
        if not _protocols(fs) & _RENAMING:
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
        except Exception as error:
            if _refused(error):
                return False
            raise
        return True

    def get_tagged(self, name: str) -> tuple[bytes, str | None]:
        """The value, and what ``put_if_tagged`` wants to see; None where the store has no such thing."""
        fs, _ = self._remote()
        if not _protocols(fs) & _S3:
            return self.get(name), None
        with _explained(self.path(name), reading=True):
            # First the tag: a value that is newer than its tag is refused later, one that is older would not be.
            tag = str(fs.info(self._remote_path(name), refresh=True)["ETag"])
        return self.get(name), tag

    def put_if_tagged(self, name: str, data: bytes, tag: str | None) -> bool:
        """Replace what still carries the tag. Without a tag it is replaced whatever it is, as well as can be done."""
        if tag is None:
            self.put(name, data)
            return True
        fs, _ = self._remote()
        with _explained(self.path(name)):
            try:
                fs.pipe_file(self._remote_path(name), data, IfMatch=tag)
            except Exception as error:
                if _refused(error):
                    return False
                raise
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

    Other stores have no such thing: there it is a *lease*, an object with owner and heartbeat. ``keep`` renews it in a
    thread; a lease whose heartbeat is older than ``lease_s`` is taken over, and so is one at once whose process ran on
    this very machine and is gone. On S3 both creation and replacement are conditional, so that of two jobs that want it
    in the same instant one gets it. Its limits: clocks of the two hosts must agree to much less than ``lease_s``; a job
    that is frozen, or cut off from the store, for longer than that loses its lease and finds out only at its next
    heartbeat. So the lease is no more than a courtesy: that two jobs never both go on is because records of the epoch
    log are created and never replaced.
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
        self._owner = {"pid": os.getpid(), "host": socket.gethostname(), "job": job, "started": started, **_machine()}
        self._token = uuid.uuid4().hex
        self._descriptor: int | None = None
        self._leased = False
        self._lost: CheckpointInUse | None = None
        self._released = threading.Event()
        self._renewing = threading.Lock()
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
        with self._renewing:
            if not self._leased:
                self.check()
                return
            holder, tag = self._read_lease()
            mine = holder.get("token") == self._token
            if not mine or not self.store.put_if_tagged(LOCK_NAME, self._lease(now_s), tag):
                self._leased = False
                self._lost = _in_use(self.store.url, holder if not mine else self._read_lease()[0])
                raise self._lost

    def keep(self, now_s: Callable[[], float]) -> None:
        """Renew a lease from now on, in a thread. A store that is away is no reason to give up: see ``check``."""
        if not self._leased:
            return

        def renew() -> None:
            while not self._released.wait(self.lease_s / 6):
                try:
                    self.heartbeat(now_s())
                except CheckpointInUse:
                    return
                except Exception:
                    continue  # the store is away, which its other users will say

        threading.Thread(target=renew, name="penstock-lease", daemon=True).start()

    def check(self) -> None:
        """Raise CheckpointInUse if another job has taken the lease."""
        if self._lost is not None:
            raise self._lost

    def release(self) -> None:
        """Let the next job in. The file itself stays: to remove it would race with whoever opens it now."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            _locked.discard(self)
            os.ftruncate(descriptor, 0)
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)
            return
        self._released.set()
        with self._renewing:
            if not self._leased:
                return
            self._leased = False
            # If the store is away, the lease runs out by itself.
            with contextlib.suppress(Exception):
                if self._read_lease()[0].get("token") == self._token:
                    self.store.delete(LOCK_NAME)

    def _acquire(self, now_s: float | None) -> None:
        if self.store.root is not None:
            self._acquire_local(self.store.root)
            return
        assert now_s is not None, "a lease needs the time"
        if not self.store.put_if_absent(LOCK_NAME, self._lease(now_s)):
            holder, tag = self._read_lease()
            alive = now_s - float(holder.get("heartbeat_s", 0.0)) <= self.lease_s and not _is_gone(holder)
            if holder.get("token") != self._token:  # else our own try, whose answer was lost
                if alive:
                    raise _in_use(self.store.url, holder)
                self.store.put_if_tagged(LOCK_NAME, self._lease(now_s), tag)
            winner, _ = self._read_lease()
            if winner.get("token") != self._token:
                raise _in_use(self.store.url, winner)
        self._leased = True

    def _acquire_local(self, root: str) -> None:
        path = os.path.join(root, LOCK_NAME)
        with _explained(path):
            make_directories(root)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
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

    def _read_lease(self) -> tuple[dict[str, Any], str | None]:
        try:
            data, tag = self.store.get_tagged(LOCK_NAME)
        except FileNotFoundError:
            return {}, None
        return _parse(data), tag

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


def _machine() -> dict[str, Any]:
    """What tells a process for good: which start of which machine, which space of process numbers, and when it began.
    Host names repeat, and so do process numbers."""
    with contextlib.suppress(OSError):
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return {"boot": f"{boot} {os.readlink('/proc/self/ns/pid')}", "began": psutil.Process().create_time()}
    return {}


def _is_gone(holder: Mapping[str, Any]) -> bool:
    """True only if the holder ran here and certainly runs no more."""
    if not holder.get("boot") or holder["boot"] != _machine().get("boot"):
        return False
    try:
        process = psutil.Process(int(holder["pid"]))
        dead: bool = process.status() == psutil.STATUS_ZOMBIE or abs(process.create_time() - holder["began"]) > 1.0
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:
        return False
    return dead


def _protocols(fs: Any) -> set[str]:
    return {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)


def _s3_defaults() -> dict[str, Any]:
    """Listings are always fresh, and a call fails soon enough for us to decide what to do about it."""
    timeouts = {"connect_timeout": 5, "read_timeout": 20, "retries": {"max_attempts": 1}}
    return {"use_listings_cache": False, "config_kwargs": timeouts}


def _refused(error: BaseException) -> bool:
    """A conditional write whose condition did not hold."""
    code = (getattr(error, "response", None) or {}).get("Error", {}).get("Code", "")
    cause = error.__cause__
    return (
        isinstance(error, FileExistsError)
        or code == "PreconditionFailed"
        or (cause is not None and cause is not error and _refused(cause))
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
    except Exception as error:
        if not isinstance(error, OSError):
            if type(error).__name__ in ("NoCredentialsError", "PartialCredentialsError"):
                raise CheckpointError(
                    f"{path} cannot be reached: {error}.",
                    remedy="Give the store's credentials the way its own tools want them, such as AWS_ACCESS_KEY_ID "
                    "and AWS_SECRET_ACCESS_KEY.",
                    path=path,
                ) from error
            raise
        if error.errno in _FULL:
            raise StorageFull(
                f"No room left to write {path}.",
                remedy="Free some space or raise the quota; the job goes on from its last checkpoint.",
                path=path,
            ) from error
        # Those that s3fs raises have a message and no number.
        why = os.strerror(error.errno) if error.errno is not None else str(error)
        if error.errno in _FORBIDDEN or isinstance(error, PermissionError):
            raise CheckpointError(
                f"{path} may not be {'read' if reading else 'written'} ({why}).",
                remedy="Give this user access to the checkpoint directory, or choose another one.",
                path=path,
            ) from error
        if (error.errno in _MISSING or isinstance(error, FileNotFoundError)) and not reading:
            raise CheckpointError(
                f"{path} cannot be used ({why}).",
                remedy="Check that the checkpoint directory is a directory, and that its device is mounted; or that "
                "the bucket exists.",
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
        file = open(temporary, "xb", opener=private_opener)
    except FileNotFoundError:
        make_directories(folder)
        file = open(temporary, "xb", opener=private_opener)
    try:
        with file:
            _write(file, data, durable)
        yield temporary
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def private_opener(path: str, flags: int) -> int:
    """For ``open``: a file that is made is for its owner alone, whatever the umask."""
    return os.open(path, flags | os.O_CLOEXEC, FILE_MODE)


def _create_exclusively(path: str, data: bytes) -> bool:
    try:
        with open(path, "xb", opener=private_opener) as file:
            _write(file, data, True)
    except FileExistsError:
        return False
    return True


def _write(file: BinaryIO, data: bytes, durable: bool) -> None:
    """A large file reaches the disk bit by bit: file systems make a small one that is written meanwhile, such as an
    epoch's record, wait for all of it that has piled up."""
    view = memoryview(data)
    for begin in range(0, max(1, len(view)), FLUSH_BYTES):
        file.write(view[begin : begin + FLUSH_BYTES])
        file.flush()
        if durable:
            os.fsync(file.fileno())


def make_directories(folder: str) -> None:
    """Make missing directories, for their owner alone, and flush the entries of those made: a file in an unflushed
    directory is lost too. Those that are there stay as they are."""
    if os.path.isdir(folder):
        return
    parent = os.path.dirname(folder)
    if parent != folder:
        make_directories(parent)
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, DIRECTORY_MODE)
        _sync_directory(parent)


def _sync_directory(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


__all__ = ["LOCK_NAME", "DirectoryLock", "FsspecStore", "local_path", "make_directories", "private_opener"]
