"""Downloads Kafka's jars once and verifies their checksums.

``jars.lock`` beside this module lists each file with its size and SHA-256, so the files that run are those that were
tested, whatever repository serves them. ``python -m outbox.sandbox.jars lock`` regenerates it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Final

from outbox.sandbox import _download
from outbox.sandbox._dirs import cache_dir, locked_file
from outbox.sandbox.errors import ServiceError

KAFKA: Final = "kafka"

Roots = Mapping[str, tuple[bool, tuple[str, ...]]]
"""By set: whether it includes the artifacts' dependencies, and the artifacts."""


ROOTS: Final[Roots] = {
    # kafka-clients is listed because log4j's platform would pull in an older version.
    KAFKA: (
        True,
        (
            "org.apache.kafka:kafka_2.13:4.2.1",
            "org.apache.kafka:kafka-clients:4.2.1",
            "org.apache.kafka:kafka-server:4.2.1",
            "org.apache.logging.log4j:log4j-slf4j-impl:2.25.4",
            "org.apache.logging.log4j:log4j-core:2.25.4",
        ),
    ),
}

_WORKERS: Final = 4

Progress = Callable[[str, int, int], None]
"""Called with a file's name, the bytes downloaded so far, and its size."""


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
        """The file's name."""
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
    jars: dict[str, list[Jar]] = {}
    current: list[Jar] | None = None
    for number, line in enumerate((_lock_text() if lock is None else lock.read_text()).splitlines(), 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        if text.startswith("[") and text.endswith("]"):
            current = jars.setdefault(text[1:-1], [])
            continue
        try:
            coordinate, digest, size = text.split()
            group, artifact, version = coordinate.split(":")
            if current is None:
                raise ValueError("a jar before the first set")
            current.append(Jar(group, artifact, version, digest.removeprefix("sha256:"), int(size)))
        except ValueError:
            raise ServiceError(f"jars.lock, line {number} can't be read: {line!r}; reinstall outbox-kafka") from None
    try:
        return jars[set_name]
    except KeyError:
        raise ServiceError(f"jars.lock has no set {set_name!r}, only {', '.join(sorted(jars))}") from None


def fetch(set_name: str, progress: Progress | None = None, *, lock: Path | None = None) -> list[Path]:
    """Return the jars of a set (``"kafka"``) as files in the cache, downloading what is missing.

    progress   called with the progress of each file. None: a progress bar on standard error if that is a terminal, else
               one line at the start and one at the end; nothing if all files are cached.
    lock       as for ``locked``.

    Interrupted downloads are resumed. Two processes can fetch at the same time. Raises ServiceError when the
    repository stays unreachable, ServiceError when it serves different bytes.
    """
    jars = locked(set_name, lock)
    directory = cache_dir() / "jars"
    paths = [directory / f"{jar.sha256[:16]}-{jar.name}" for jar in jars]
    missing = [(jar, path) for jar, path in zip(jars, paths, strict=True) if not _cached(path, jar)]
    if not missing:
        return paths
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ServiceError(f"the cache {directory} can't be made: {error}; set OUTBOX_CACHE to another") from error
    base = repository()
    size = sum(jar.size for jar, _ in missing)
    showing = contextlib.nullcontext(progress) if progress else _download.display(set_name, len(missing), size)
    with showing as report, ThreadPoolExecutor(_WORKERS, thread_name_prefix="jars") as pool:
        cancelled = threading.Event()

        def unless_cancelled(name: str, here: int, size: int) -> None:
            if cancelled.is_set():
                raise CancelledError
            report(name, here, size)

        pending = [pool.submit(_fetch_one, base, jar, path, unless_cancelled) for jar, path in missing]
        try:
            for future in pending:
                future.result()
        except BaseException:
            # One failure, or Ctrl-C, ends the others at their next chunk.
            cancelled.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return paths


def repository() -> str:
    """Return the Maven repository's address: $OUTBOX_MAVEN_REPOSITORY, or the one jgo comes with."""
    if given := os.environ.get("OUTBOX_MAVEN_REPOSITORY"):
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


def _fetch_one(base: str, jar: Jar, path: Path, report: Progress) -> None:
    """Download one jar into the cache, under a lock that keeps other processes out and is released if we die."""
    with locked_file(path.with_name(path.name + ".lock")):
        if _cached(path, jar):
            report(jar.name, jar.size, jar.size)
            return
        part = path.with_name(path.name + ".part")
        left_over = part.exists()
        digest = _download_to(part, base, jar, report)
        if digest != jar.sha256 and left_over:
            # The part that an earlier process left may be damaged, for example by a crash of the machine.
            part.unlink()
            digest = _download_to(part, base, jar, report)
        if digest != jar.sha256:
            part.unlink()
            raise ServiceError(
                f"{base}/{jar.path} has the SHA-256 {digest}, jars.lock says {jar.sha256}: the repository or "
                "something before it serves another file. It was thrown away; set OUTBOX_MAVEN_REPOSITORY to one "
                "you trust"
            )
        part.replace(path)
        # Store the verified file's size and modification time beside it, so that the next use need not read it all.
        _seal(path, jar)


def _download_to(part: Path, base: str, jar: Jar, report: Progress) -> str:
    """Complete a download. Returns the file's SHA-256."""
    _download.resume(f"{base}/{jar.path}", part, jar.size, lambda here: report(jar.name, here, jar.size))
    return sha256(part)


def _cached(path: Path, jar: Jar) -> bool:
    """Return whether the cache has this file. Its content is read only if it was modified since the last check."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return False
    try:
        if _seal_path(path).read_text() == _seal_text(status, jar):
            return True
    except FileNotFoundError:
        pass
    if status.st_size != jar.size or sha256(path) != jar.sha256:
        return False
    _seal(path, jar)
    return True


def _seal(path: Path, jar: Jar) -> None:
    _seal_path(path).write_text(_seal_text(path.stat(), jar))


def _seal_path(path: Path) -> Path:
    return path.with_name(path.name + ".checked")


def _seal_text(status: os.stat_result, jar: Jar) -> str:
    return f"{jar.sha256} {status.st_size} {status.st_mtime_ns}\n"


def sha256(path: Path) -> str:
    """Return a file's SHA-256 as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _lock_text() -> str:
    return files("outbox.sandbox").joinpath("jars.lock").read_text()


# -- writing the lock


def resolve(roots: Roots, heading: Iterable[str]) -> str:
    """Resolve the roots through jgo and download every artifact. Returns the text of the lock file."""
    from jgo.maven import MavenContext

    lines = [f"# {line}" for line in heading]
    context = MavenContext(remote_repos={"repository": repository()})
    for set_name, (transitive, coordinates) in roots.items():
        wanted = [context.create_dependency(coordinate) for coordinate in coordinates]
        resolved = context.resolver.resolve(wanted, transitive=transitive)
        lines += ["", f"[{set_name}]"]
        entries = set()
        for dependency in [*resolved[0], *(resolved[1] if transitive else [])]:
            file = Path(dependency.artifact.resolve())
            coordinate = f"{dependency.groupId}:{dependency.artifactId}:{dependency.version}"
            entries.add(f"{coordinate}  sha256:{sha256(file)}  {file.stat().st_size}")
        lines += sorted(entries)
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    """``lock`` writes jars.lock; ``fetch SET…`` fills the cache and prints the files. Returns the exit status."""
    from outbox._app import logs

    logs.configure()  # to standard error, where retries of a download are logged
    match arguments:
        case ["lock"]:
            target = Path(__file__).with_name("jars.lock")
            heading = (
                "What Kafka is run from: Maven coordinates, SHA-256, size in bytes.",
                "Written by: python -m outbox.sandbox.jars lock",
            )
            target.write_text(resolve(ROOTS, heading))
            print(target)
        case ["fetch", *names] if names:
            for name in names:
                print(*fetch(name), sep="\n")
        case _:
            print(f"usage: python -m outbox.sandbox.jars lock | fetch {'|'.join(ROOTS)}", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
