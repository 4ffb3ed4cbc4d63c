"""The directories of the sandbox on this machine, and who can access them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outbox.sandbox.errors import ServiceError


@dataclass(frozen=True, slots=True)
class User:
    """An account that a server runs as."""

    name: str
    uid: int
    gid: int


def identity(user: User | None) -> dict[str, Any]:
    """Return the arguments of subprocess that make a program run as ``user``; none for None, our own account."""
    return {} if user is None else {"user": user.uid, "group": user.gid, "extra_groups": []}


def cache_dir() -> Path:
    """Return the cache directory: $OUTBOX_CACHE, $XDG_CACHE_HOME/outbox or ~/.cache/outbox."""
    usual = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "outbox")
    return Path(os.environ.get("OUTBOX_CACHE") or usual).expanduser().absolute()


def unprivileged_user() -> User | None:
    """Return the account that servers run as when we are root; None when we are not.

    ``postgres`` where it exists, else ``nobody``. Raises ServiceError when there is neither.
    """
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return User(name, entry.pw_uid, entry.pw_gid)
    raise ServiceError(
        "a server does not run as root, and neither the user postgres nor nobody exists; add one, or run as an "
        "ordinary user"
    )


def blocking_directory(path: Path, user: User | None) -> Path | None:
    """Return the first directory above ``path`` (or itself) that ``user`` may not pass through, or None.

    Directories that do not exist yet are not checked, nor is anything for ``user`` None (this process's own account).
    """
    if user is None:
        return None
    for directory in [*reversed(path.absolute().parents), path.absolute()]:
        try:
            status = directory.stat()
        except FileNotFoundError:
            return None
        if not stat.S_ISDIR(status.st_mode):
            continue
        if status.st_uid == user.uid:
            allowed = status.st_mode & stat.S_IXUSR
        elif status.st_gid == user.gid:
            allowed = status.st_mode & stat.S_IXGRP
        else:
            allowed = status.st_mode & stat.S_IXOTH
        if not allowed:
            return directory
    return None


def make_directory(path: Path, user: User | None) -> None:
    """Make a directory and its missing parents; ``user`` can pass through all that were made here.

    A directory that exists and is ours is opened in the same way; its parents are left as they are.
    """
    if not path.parent.exists():
        make_directory(path.parent, user)
    path.mkdir(exist_ok=True)
    if user is not None and path.stat().st_uid == os.geteuid():
        path.chmod(path.stat().st_mode | stat.S_IXOTH)


def hand_over(path: Path, user: User | None) -> None:
    """Let a file, or a directory with all in it, belong to ``user``; None: to us. Only root changes anything.

    What belongs to that user already is left alone: there could be links in it to others' files.
    """
    uid, gid = (os.geteuid(), os.getegid()) if user is None else (user.uid, user.gid)
    if os.geteuid() != 0 or path.lstat().st_uid == uid:
        return
    # The directory itself comes last, so that an interrupted change is begun again.
    for parent, directories, files in os.walk(path, topdown=False):
        for name in (*directories, *files):
            os.lchown(Path(parent, name), uid, gid)
    os.lchown(path, uid, gid)


def temporary_directory(purpose: str, user: User | None) -> Path:
    """Make a new directory for a server that ``user`` runs: in $TMPDIR when that user can reach it."""
    for base in (Path(tempfile.gettempdir()), Path("/tmp"), Path("/var/tmp")):  # noqa: S108 - mkdtemp names it
        if base.is_dir() and blocking_directory(base, user) is None:
            directory = Path(tempfile.mkdtemp(prefix=f"outbox-testing-{purpose}-", dir=base))
            if user is not None:
                directory.chmod(0o711)
            return directory
    assert user is not None
    raise ServiceError(f"the user {user.name} can't reach a temporary directory; set TMPDIR to one that it can")


def shared_dir(user: User) -> Path:
    """Return a directory of ours that ``user`` can reach, for its programs and data.

    The cache directory if that user can reach it, else /var/cache/outbox: root's home is usually closed.
    Raises ServiceError when that belongs to another user, or other users may write to it.
    """
    directory = cache_dir()
    if blocking_directory(directory, user) is not None:
        directory = Path("/var/cache/outbox")
    make_directory(directory, user)
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise ServiceError(
            f"{directory} must be a directory that belongs to root and that others can't write to; remove it"
        )
    return directory


@contextlib.contextmanager
def locked_file(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file, which is created if it is missing. It is released if we die."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
