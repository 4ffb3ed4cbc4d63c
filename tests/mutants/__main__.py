"""The command behind `make mutants`: run the tests of each mutant with its change, in a copy of the tree.

First all of them without any change: they must pass. Exit status 1 if a mutant survives.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

_ROOT: Final = Path(__file__).parents[2]
# In the place of this folder, whose modules are those of a package.
sys.path[:1] = [str(_ROOT / "tests")]

from mutants.table import MUTANTS, Mutant  # noqa: E402

_COPIED: Final = ("outbox", "relay", "spark_jobs", "migrations", "tests", "examples", "docs", "deploy")
_FAILED: Final = 1
_LONGEST_SECONDS: Final = 900.0
"""For the tests of one argument, a file or a folder."""


def main() -> int:
    """Run the mutants that the arguments choose, and print a table."""
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these mutants")
    parser.add_argument(
        "--unchanged", action=argparse.BooleanOptionalAction, default=True, help="run without a change too"
    )
    given = parser.parse_args()
    if unknown := set(given.names) - {one.name for one in MUTANTS}:
        parser.error(f"there is no mutant {', '.join(sorted(unknown))}")
    chosen = [one for one in MUTANTS if not given.names or one.name in given.names]
    with tempfile.TemporaryDirectory(prefix="outbox-mutants-") as folder:
        tree = _copy(Path(folder))
        if given.unchanged:
            passed, killed_by, _ = _tests(tree, sorted({test for one in chosen for test in one.tests}))
            if not passed:
                print(f"without any change fails: {killed_by}", file=sys.stderr)
                return 2
        table = Table("mutant", "breaks", "killed by", "seconds")
        survivors = 0
        for one in chosen:
            survived, killed_by, seconds = _run(tree, one)
            survivors += survived
            table.add_row(one.name, one.breaks, "[bold]nothing[/]" if survived else killed_by, f"{seconds:.0f}")
            print(f"{one.name}: {'SURVIVED' if survived else killed_by}", file=sys.stderr, flush=True)
    Console(width=160).print(table)
    return 1 if survivors else 0


def _copy(folder: Path) -> Path:
    for name in _COPIED:
        shutil.copytree(_ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "Makefile", "docker-compose.yml", "CHANGELOG.md"):
        shutil.copy(_ROOT / file, folder / file)
    return folder


def _run(tree: Path, mutant: Mutant) -> tuple[bool, str, float]:
    file = tree / mutant.file
    original = file.read_text()
    file.write_text(original.replace(mutant.old, mutant.new, 1))
    try:
        return _tests(tree, mutant.tests)
    finally:
        file.write_text(original)


def _tests(tree: Path, tests: Collection[str]) -> tuple[bool, str, float]:
    """Return whether the tests pass, else the first that fails, and the seconds."""
    began = time.monotonic()
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-n",
            "0",
            "-x",
            "-q",
            "--no-header",
            "-rfE",
            "-p",
            "no:cacheprovider",
            *tests,
        ],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
        timeout=_LONGEST_SECONDS * len(tests),
        check=False,
    )
    summary = done.stdout.rpartition("short test summary info")[2].splitlines()
    failed = [line.split()[1] for line in summary if line.startswith("FAILED ")]
    if done.returncode != 0 and (done.returncode != _FAILED or not failed):
        raise SystemExit(f"pytest ended with {done.returncode}:\n{done.stdout[-4000:]}{done.stderr[-2000:]}")
    return done.returncode == 0, failed[0] if failed else "", time.monotonic() - began


if __name__ == "__main__":
    sys.exit(main())
