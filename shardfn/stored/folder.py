"""The folder of stored compilations: where it is, whose it is, and how large it may be.

SHARDFN_CACHE_DIR names its parent; empty, nothing is stored. Without it, it is in the user's
cache folder. A file that is not ours, damaged or incomplete is not read: each carries a code
(HMAC) that only the holder of the folder's key can make.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import os
import secrets
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import attrs

from .._compat import cache_folder, not_private
from ..byte_sizes import bytes_of
from . import complete_files

try:
    import fcntl
except ImportError:  # Windows: nothing is stored there
    fcntl = None

LIMIT = "SHARDFN_CACHE_SIZE"
DEFAULT_LIMIT = "1GB"
NAME = "compilations"
KEY = "key"
SUFFIX = ".step"
HOUR = 3600.0  # seconds after which a partial file is a rest
BITS = 32  # bytes of the key, and of a code
WAIT = 600.0  # seconds for which a process waits for another's compilation
PAUSE = 0.05
_warned: set[str] = set()  # the problems that this process has been told


@attrs.frozen
class Folder:
    """The folder of stored compilations of one user.

    Args:
        path: the folder, of mode 0700.
    """

    path: Path

    def read(self, name: str) -> bytes | None:
        """The text under a name. None if there is none, or if it is damaged."""
        path = self.path / f"{name}{SUFFIX}"
        try:
            found = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            complain(f"{path} cannot be read: {error}")
            return None
        code, text = found[:BITS], found[BITS:]
        key = self._key()
        if key is not None and hmac.compare_digest(code, _code(key, name, text)):
            with contextlib.suppress(OSError):  # a folder that is only read
                os.utime(path)  # the files that are used last stay
            return text
        self.refuse(name, "the file is damaged, or another user stored it")
        return None

    def refuse(self, name: str, reason: str) -> None:
        """Drop what was stored under a name, and warn."""
        path = self.path / f"{name}{SUFFIX}"
        complain(f"{path} is compiled again: {reason}")
        with contextlib.suppress(OSError):
            path.unlink()

    def write(self, name: str, text: bytes) -> None:
        """Store a text under a name. A failure is a warning."""
        try:
            key = self._key() or self._new_key()
            code = _code(key, name, text)
            complete_files.write(self.path / f"{name}{SUFFIX}", code + text)
            self._shrink()
        except OSError as error:
            complain(f"compilations are not cached in {self.path}: {error}")

    @contextlib.contextmanager
    def alone(self, name: str) -> Iterator[None]:
        """Hold a lock on a name, one process at a time, inside this context. Others wait, but not
        for ever.
        """
        handle = self._lock(name)
        try:
            yield
        finally:
            if handle is not None:
                os.close(handle)  # which unlocks it

    def _lock(self, name: str) -> int | None:
        """Open and lock a file; None in a read-only folder."""
        path = self.path / f"{name[:2]}.lock"  # few files, which stay
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError:
            return None
        _wait_for(handle)
        return handle

    def entries(self) -> list[tuple[float, int, Path]]:
        """The stored files: when each was last used, its bytes, its path."""
        rows = []
        for path in self.path.glob(f"*{SUFFIX}"):
            with contextlib.suppress(OSError):
                about = path.stat()
                rows.append((about.st_mtime, about.st_size, path))
        return sorted(rows)

    def clear(self) -> None:
        """Remove what is stored."""
        for _, _, path in self.entries():
            with contextlib.suppress(OSError):
                path.unlink()

    def _shrink(self) -> None:
        """Remove the files that were used least recently, until the rest is small enough."""
        old = time.time() - HOUR
        for path in self.path.glob(f"{complete_files.PARTIAL}*"):
            if path.stat().st_mtime < old:
                path.unlink(missing_ok=True)
        rows = self.entries()
        excess = sum(size for _, size, _ in rows) - limit()
        for _, size, path in rows:
            if excess <= 0:
                return
            path.unlink(missing_ok=True)
            excess -= size

    def _key(self) -> bytes | None:
        with contextlib.suppress(OSError):
            found = (self.path / KEY).read_bytes()
            return found if len(found) == BITS else None
        return None

    def _new_key(self) -> bytes:
        """Create the folder's key, by whichever process is first."""
        complete_files.write(self.path / KEY, secrets.token_bytes(BITS), keep=True)
        found = self._key()
        if found is None:
            complete_files.write(self.path / KEY, secrets.token_bytes(BITS))
            found = self._key()
        if found is None:
            raise OSError(errno.EIO, "the cache key was written, but cannot be read")
        return found


def own_folder() -> Folder | None:
    """Open this user's folder of compilations; None if nothing is to be stored or
    nothing can be.
    """
    path = place()
    if path is None or fcntl is None:
        return None
    problem = not_private(path)
    if problem is None:
        return Folder(path)
    complain(f"compilations are not cached in {path}: {problem}")
    return None


def place() -> Path | None:
    """Return the path of the folder; None if SHARDFN_CACHE_DIR is empty."""
    parent = cache_folder()
    return parent / NAME if parent is not None else None


def limit() -> int:
    """Return how many bytes may be stored."""
    said = os.environ.get(LIMIT, DEFAULT_LIMIT)
    try:
        return bytes_of(said)
    except ValueError:
        complain(f"{LIMIT} is {said!r}, taken for {DEFAULT_LIMIT}")
        return bytes_of(DEFAULT_LIMIT)


def complain(problem: str) -> None:
    """Warn of a problem once in a process."""
    if problem not in _warned:
        _warned.add(problem)
        warnings.warn(f"shardfn: {problem}", stacklevel=2)


def _code(key: bytes, name: str, text: bytes) -> bytes:
    return hmac.digest(key, name.encode() + b"\0" + text, hashlib.sha256)


def _wait_for(handle: int) -> None:
    """Lock a file, or proceed without the lock after a while."""
    end = time.monotonic() + WAIT
    while fcntl is not None and time.monotonic() < end:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(PAUSE)
