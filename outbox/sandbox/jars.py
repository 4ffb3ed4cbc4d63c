"""Downloads Kafka's jars once and verifies their checksums.

``jars.lock`` beside this module lists each file with its size and SHA-256, so the files that run are those that were
tested, whatever repository serves them. ``python -m release.jars`` regenerates it.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import shutil
import ssl
import stat
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from typing import Final

import stamina

from outbox.sandbox._dirs import User, blocking_directory, cache_dir, locked_file, make_directory, shared_dir
from outbox.sandbox.errors import ServiceError
from outbox.sandbox.versions import DEFAULT, jars_of

KAFKA: Final = jars_of(DEFAULT)

_WORKERS: Final = 4
_TIMEOUT: Final = 30.0
_ATTEMPTS: Final = 6
_RETRIED_CLIENT_ERRORS: Final = {408, 425, 429}


@dataclass(frozen=True, slots=True, order=True)
class Jar:
    """One file of the lock: Maven coordinates, SHA-256 as hexadecimal digits, size in bytes."""

    group: str
    artifact: str
    version: str
    sha256: str
    size: int

    @property
    def name(self) -> str:
        return f"{self.artifact}-{self.version}.jar"

    @property
    def path(self) -> str:
        """Its path in a Maven repository."""
        return f"{self.group.replace('.', '/')}/{self.artifact}/{self.version}/{self.name}"

    def __str__(self) -> str:
        return f"{self.group}:{self.artifact}:{self.version}"


def locked(set_name: str, lock: Path | None = None) -> list[Jar]:
    """Return the jars of a set in the lock file. Raises ServiceError when there is no such set.

    lock   another lock file than our own, for jars that only some tests need.
    """
    sets: dict[str, list[Jar]] = {}
    jars: list[Jar] = []
    for line in (_lock_text() if lock is None else lock.read_text()).splitlines():
        if line.startswith("["):
            jars = sets.setdefault(line.strip("[]"), [])
        elif line and not line.startswith("#"):
            try:
                coordinate, digest, size = line.split()
                group, artifact, version = coordinate.split(":")
                jars.append(Jar(group, artifact, version, digest.removeprefix("sha256:"), int(size)))
            except ValueError:
                raise ServiceError(f"jars.lock has {line!r}, which can't be read; reinstall outbox-kafka") from None
    if set_name not in sets:
        raise ServiceError(f"jars.lock has no set {set_name!r}, only {', '.join(sorted(sets))}")
    return sets[set_name]


def fetch(set_name: str, lock: Path | None = None) -> list[Path]:
    """Return the jars of a set (``"kafka"``) as files in the cache, downloading what is missing.

    lock   as for ``locked``.

    Says on standard error that it downloads. Two processes can fetch at the same time. Raises ServiceError
    when the repository stays unreachable, does not have a file, or serves different bytes.
    """
    directory = cache_dir() / "jars"
    wanted = {jar: directory / f"{jar.sha256[:16]}-{jar.name}" for jar in locked(set_name, lock)}
    missing = {jar: path for jar, path in wanted.items() if not _is_cached(path, jar)}
    if missing:
        base, began = repository(), time.monotonic()
        title = f"Downloading {set_name} ({len(missing)} files, {sum(jar.size for jar in missing) / 1e6:,.0f} MB)"
        print(f"{title} …", file=sys.stderr, flush=True)
        with ThreadPoolExecutor(_WORKERS, thread_name_prefix="jars") as pool:
            # The first failure cancels those that have not begun.
            list(pool.map(partial(_fetch_one, base), missing.keys(), missing.values()))
        print(f"{title}: done in {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return list(wanted.values())


def readable(jars: list[Path], user: User) -> list[Path]:
    """Return these jars if ``user`` can read them, or else copies, which are made once.

    Raises ServiceError when they can't be copied.
    """
    if all(blocking_directory(jar.parent, user) is None and jar.stat().st_mode & stat.S_IROTH for jar in jars):
        return jars
    directory = shared_dir(user) / "readable-jars"
    copies = [directory / jar.name for jar in jars]
    try:
        make_directory(directory, user)
        with locked_file(directory / "lock"):
            for jar, copy in zip(jars, copies, strict=True):
                if not copy.exists():
                    part = copy.with_name(copy.name + ".part")
                    shutil.copyfile(jar, part)
                    part.chmod(0o644)
                    part.replace(copy)
    except OSError as error:
        raise ServiceError(
            f"the user {user.name} can't read {jars[0].parent}, and there is no copy: {error}. Set OUTBOX_CACHE to a "
            "directory that this user can reach"
        ) from error
    return copies


def repository() -> str:
    """Return the Maven repository's address: $OUTBOX_MAVEN_REPOSITORY, or the one jgo comes with."""
    if given := os.environ.get("OUTBOX_MAVEN_REPOSITORY"):
        if not given.startswith(("http://", "https://")):
            raise ServiceError(f"OUTBOX_MAVEN_REPOSITORY={given}: the address must start with https:// or http://")
        return given.rstrip("/")
    try:
        from jgo.maven import MavenContext
    except ImportError:
        raise ServiceError(
            "the jars' download address comes with jgo, which is not installed: install outbox-kafka[sandbox], "
            "or set OUTBOX_MAVEN_REPOSITORY to a Maven repository's address"
        ) from None
    addresses: Iterable[str] = MavenContext().remote_repos.values()
    return next(iter(addresses)).rstrip("/")


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_cached(path: Path, jar: Jar) -> bool:
    try:
        status = path.stat()
    except FileNotFoundError:
        return False
    return status.st_size == jar.size and _digest(path, status.st_mtime_ns) == jar.sha256


@cache
def _digest(path: Path, _modified_at: int) -> str:
    """Return a file's SHA-256, computed once in this process unless the file is modified."""
    return sha256_of(path)


def _fetch_one(base: str, jar: Jar, path: Path) -> None:
    """Download one jar into the cache, under a lock that keeps other processes out and is released if we die."""
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked_file(path.with_name(path.name + ".lock")):
            if not _is_cached(path, jar):
                part.write_bytes(_downloaded(f"{base}/{jar.path}", jar))
                part.replace(path)
    except OSError as error:
        raise ServiceError(f"{path} can't be written: {error}. Make room, or set OUTBOX_CACHE") from error


def _downloaded(url: str, jar: Jar) -> bytes:
    try:
        content = _tried(url, jar.size)
    except urllib.error.HTTPError as error:
        raise ServiceError(
            f"{url}: the repository answers {error.code} {error.reason}. Set OUTBOX_MAVEN_REPOSITORY to a Maven "
            "repository that has it"
        ) from error
    except (OSError, http.client.HTTPException) as error:
        raise ServiceError(
            f"{url}: {str(error) or type(error).__name__}, after {_ATTEMPTS} tries. Check the network and proxy "
            "settings, or set OUTBOX_MAVEN_REPOSITORY to a Maven repository that can be reached; "
            "the next attempt downloads only what is missing"
        ) from error
    if (digest := hashlib.sha256(content).hexdigest()) != jar.sha256:
        raise ServiceError(
            f"{url} has the SHA-256 {digest}, jars.lock says {jar.sha256}: the repository, or a proxy before it, "
            "serves another file, which was discarded. Set OUTBOX_MAVEN_REPOSITORY to a repository you trust"
        )
    return content


def _is_transient(error: Exception) -> bool:
    if isinstance(error, urllib.error.HTTPError):
        return error.code >= 500 or error.code in _RETRIED_CLIENT_ERRORS
    if isinstance(error, urllib.error.URLError) and isinstance(error.reason, ssl.SSLCertVerificationError):
        return False
    return isinstance(error, (OSError, http.client.HTTPException))


@stamina.retry(on=_is_transient, attempts=_ATTEMPTS, timeout=None, wait_initial=0.2, wait_max=10.0)
def _tried(url: str, size: int) -> bytes:
    request = urllib.request.Request(url, headers={"User-Agent": "outbox-kafka", "Accept-Encoding": "identity"})  # noqa: S310 - http or https: see repository
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT, context=_trust()) as response:  # noqa: S310
            content: bytes = response.read(size + 1)
    except urllib.error.HTTPError as error:
        error.close()
        raise
    if len(content) < size:
        raise http.client.IncompleteRead(content, size - len(content))
    return content


@cache
def _trust() -> ssl.SSLContext:
    """Return a context that trusts the system's certificates ($SSL_CERT_FILE), and certifi's if it is installed."""
    context = ssl.create_default_context()
    try:
        import certifi
    except ImportError:
        return context
    context.load_verify_locations(certifi.where())
    return context


def _lock_text() -> str:
    return files("outbox.sandbox").joinpath("jars.lock").read_text()
