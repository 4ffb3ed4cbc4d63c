"""Builds the wheel and the sdist from a repository, and checks what is in them and that they can be built again."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final
from zipfile import ZipFile

_MOVED: Final = {"migrations": "outbox/migrations"}
"""Folders of the repository that have another place in the wheel."""

_PACKAGES: Final = ("outbox", "relay", "spark_jobs")
_IN_SDIST: Final = (
    *(*_PACKAGES, "migrations", "examples", "docs"),
    *("release/readme.py", "README.md", "CHANGELOG.md", "SECURITY.md", "LICENSE", "pyproject.toml", ".gitignore"),
)


class BadRelease(Exception):
    """What was built is not what should have been."""


@dataclass(frozen=True, slots=True)
class Built:
    """The two files of a release."""

    wheel: Path
    sdist: Path


def export(repository: Path, folder: Path) -> list[str]:
    """Copy the files that belong to the repository, and no others; return their names."""
    listed = _git(repository, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    names = sorted(name for name in listed if name and (repository / name).is_file())
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(repository / name, folder / name)
    return names


def last_commit(repository: Path) -> int:
    """Return the time of the last commit, in Unix seconds."""
    return int(_git(repository, "log", "-1", "--format=%ct"))


def require_committed(repository: Path) -> None:
    """Raise BadRelease unless the folder is what the last commit has."""
    if changed := _git(repository, "status", "--porcelain"):
        raise BadRelease(f"a release is built from a commit, and this is not committed:\n{changed}")


def build(repository: Path, work: Path, out: Path) -> Built:
    """Build both into ``out``, using the empty folder ``work``, and check them. Raises BadRelease.

    The sdist is built from the repository's files, and the wheel from the sdist. Then the sdist is built from itself,
    and the wheel from the repository: from other folders and at another time, both must come out as they were.
    """
    source, unpacked, again = work / "source", work / "unpacked", work / "again"
    names = export(repository, source)
    epoch = last_commit(repository)
    out.mkdir(parents=True, exist_ok=True)
    sdist = _build(source, out, "sdist", epoch)
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, filter="data")
    [inside] = unpacked.iterdir()
    built = Built(_build(inside, out, "wheel", epoch), sdist)
    _same(built.wheel, _build(source, again, "wheel", epoch))
    _same(built.sdist, _build(inside, again, "sdist", epoch))
    check(built, names)
    return built


def check(built: Built, names: Iterable[str]) -> None:
    """Raise BadRelease if a file of the repository is missing in what was built, or anything else is in it."""
    names = list(names)
    with ZipFile(built.wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    project = "-".join(built.wheel.name.split("-")[:2])
    info = {f"{project}.dist-info/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt")}
    info.add(f"{project}.dist-info/licenses/LICENSE")
    wanted = {place for name in names if (place := _in_wheel(name)) is not None}
    _compare(built.wheel, files, wanted | info)
    with tarfile.open(built.sdist) as sources:
        inside = {str(PurePosixPath(*PurePosixPath(name).parts[1:])) for name in sources.getnames()}
    wanted = {name for name in names if name.startswith(tuple(f"{top}/" for top in _IN_SDIST)) or name in _IN_SDIST}
    _compare(built.sdist, dict.fromkeys(inside, b""), wanted | {"PKG-INFO"})


def _in_wheel(name: str) -> str | None:
    for place, other in _MOVED.items():
        if name.startswith(f"{place}/"):
            return other + name.removeprefix(place)
    return name if name.partition("/")[0] in _PACKAGES else None


def _compare(file: Path, found: Mapping[str, bytes], wanted: set[str]) -> None:
    missing, foreign = sorted(wanted - found.keys()), sorted(found.keys() - wanted)
    if missing or foreign:
        raise BadRelease(f"{file.name}: missing {missing}, not expected {foreign}")


def _same(first: Path, second: Path) -> None:
    if first.name != second.name or first.read_bytes() != second.read_bytes():
        raise BadRelease(f"{first.name} comes out otherwise when it is built again: compare it with {second}")


def _build(source: Path, out: Path, kind: str, epoch: int) -> Path:
    command = [sys.executable, "-m", "build", f"--{kind}", "--no-isolation", "--outdir", str(out), str(source)]
    env = os.environ | {"SOURCE_DATE_EPOCH": str(epoch)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BadRelease(f"the {kind} can't be built:\n{done.stdout}{done.stderr}")
    [file] = out.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return file


def _git(repository: Path, *arguments: str) -> str:
    command = ["git", "-C", str(repository), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
