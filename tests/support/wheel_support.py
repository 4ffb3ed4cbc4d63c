"""The wheel installed into an empty environment, with exactly what an extra brings along linked to it."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import Distribution, distribution, distributions
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
sys.path.append(str(ROOT))

from release.closure import CORE, closure  # noqa: E402

Completed = subprocess.CompletedProcess[str]


def environment(folder: Path) -> Path:
    """Make a virtual environment without pip, which is soon done; return its ``bin``."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    return folder / "bin"


def pip(bin_folder: Path, *arguments: str) -> str:
    """Run our pip for another environment."""
    python = str(bin_folder / "python")
    command = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


class Installed:
    """A wheel in an environment of its own, to be run with the distributions of one extra and no others."""

    def __init__(self, wheel: Path, folder: Path) -> None:
        self.folder = folder
        self.bin = environment(folder / "venv")
        pip(self.bin, "install", "--no-compile", "--no-deps", str(wheel))
        [info] = folder.glob("venv/lib/*/site-packages/outbox_kafka-*.dist-info")
        self.own = Distribution.at(info)

    def run(self, extra: str, *command: str, also: Sequence[str] = (), status: int = 0, **variables: str) -> Completed:
        """Run a command of the environment in an empty folder. ``also``: what is installed beside the extra."""
        done = subprocess.run(
            [str(self.bin / command[0]), *command[1:]],
            env=self.shell(extra, *also) | variables,
            cwd=self.empty(),
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == status, (done.returncode, done.stdout[-3000:], done.stderr[-3000:])
        return done

    @contextmanager
    def running(
        self, extra: str, *command: str, errors: Path, status: int = 0, **variables: str
    ) -> Iterator[subprocess.Popen[str]]:
        """Run a command meanwhile, with its standard error in a file; end it by SIGTERM and expect this status."""
        with errors.open("w") as log:
            process = subprocess.Popen(
                [str(self.bin / command[0]), *command[1:]],
                env=self.shell(extra) | variables,
                cwd=self.empty(),
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        with process:
            try:
                yield process
                process.terminate()
                assert process.wait(60) == status, errors.read_text()[-3000:]
            finally:
                process.kill()

    def shell(self, extra: str, *also: str) -> dict[str, str]:
        """Return the environment variables of a shell in which the extra is installed, and nothing is set."""
        kept = {name: os.environ[name] for name in ("HOME", "JAVA_HOME", "JDK_JAVA_OPTIONS") if name in os.environ}
        path = os.pathsep.join([str(self.bin), os.environ["PATH"]])
        return kept | {"PATH": path, "PYTHONPATH": str(self.links(extra, *also))}

    def empty(self) -> Path:
        """Return a folder in which nothing of the repository can be imported."""
        folder = self.folder / "empty"
        folder.mkdir(exist_ok=True)
        return folder

    def links(self, extra: str, *also: str) -> Path:
        """Return a folder that has what the extra brings along, and these."""
        folder = self.folder / "-".join(["links", extra, *also])
        if not folder.exists():
            folder.mkdir()
            requires = self.own.requires or ()
            wanted = closure(requires, CORE).keys() | closure(requires, extra).keys() | closure(also, CORE).keys()
            for name in wanted:
                _link(distribution(name), folder)
        return folder


def imported(errors: str) -> set[str]:
    """Return the modules that a process has imported, from its output under PYTHONPROFILEIMPORTTIME."""
    return set(re.findall(r"^import time: +\d+ \| +\d+ \| +([\w.]+)$", errors, re.MULTILINE))


@functools.cache
def _shared() -> frozenset[str]:
    """Return the folders of site-packages in which more than one distribution has files."""
    seen: set[str] = set()
    shared: set[str] = set()
    for one in distributions():
        tops = {path.parts[0] for path in one.files or () if len(path.parts) > 1}
        shared |= tops & seen
        seen |= tops
    return frozenset(shared)


def _link(one: Distribution, folder: Path) -> None:
    """Link what it has in site-packages: folders as a whole, unless others have files there too."""
    inside = [path for path in one.files or () if not {"..", "__pycache__"} & set(path.parts)]
    for name in {str(path) if path.parts[0] in _shared() else path.parts[0] for path in inside}:
        link = folder / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(str(one.locate_file(name)))
