"""Finds a Java new enough for Kafka and Spark."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Final

from outbox.sandbox.errors import ServiceError

MINIMUM: Final = 17
_HINT: Final = (
    f"install Java {MINIMUM} or newer (Debian, Ubuntu: apt install openjdk-17-jre-headless; Fedora: dnf install "
    "java-21-openjdk-headless; macOS: brew install openjdk) or set JAVA_HOME to one"
)


def java() -> Path:
    """Return the ``java`` program of $JAVA_HOME, else of $PATH.

    Raises ServiceError, saying what to install, when there is none or it is older than 17.
    """
    return _java(os.environ.get("JAVA_HOME"), os.environ.get("PATH"))


@cache
def _java(home: str | None, path: str | None) -> Path:
    if home:
        program = Path(home, "bin", "java")
        if not program.is_file():
            raise ServiceError(f"JAVA_HOME={home} contains no bin/java; {_HINT}")
    else:
        found = shutil.which("java", path=path)
        if found is None:
            raise ServiceError(f"Kafka needs Java, and there is none on the PATH; {_HINT}")
        program = Path(found)
    result = subprocess.run([program, "-version"], capture_output=True, text=True, check=False)
    output = result.stdout + result.stderr
    match = re.search(r'version "(\d+)(?:\.(\d+))?', output)
    if result.returncode != 0 or match is None:
        # macOS has a stub named java that only says where to get one.
        raise ServiceError(f"{program} is not a working Java ({output.strip()[:200]}); {_HINT}")
    # Up to Java 8 the version was written 1.8.
    version = int(match[2] or 0) if match[1] == "1" else int(match[1])
    if version < MINIMUM:
        raise ServiceError(f"{program} is Java {version}; {_HINT}")
    return program
