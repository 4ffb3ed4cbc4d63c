"""Settings for servers of tests and of chaos: started often, killed often, and on a small machine."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Final

import psutil
from class_archives import ARCHIVES, QUIET

from outbox.sandbox import _broker, _dirs

_MEMORY: Final = Path("/dev/shm")


def prepare(*, in_memory: bool = True) -> None:
    """Set what JVMs and time limits read from the environment, and where servers keep their files."""
    # A time limit costs nothing where a test passes, and everything where the machine is slow.
    os.environ.setdefault("OUTBOX_PATIENCE", "4")
    # Short lives: the second compiler of a JVM, which Spark and Kafka start with, takes half of all processor time.
    # To verify classes that are in no archive takes time too; those of an archive were verified when it was made.
    options = ["-XX:TieredStopAtLevel=1", "-XX:+UnlockDiagnosticVMOptions", "-XX:-BytecodeVerificationRemote"]
    if ARCHIVES["spark"].exists():
        options += [f'-XX:SharedArchiveFile="{ARCHIVES["spark"]}"', *QUIET]
    os.environ.setdefault("JDK_JAVA_OPTIONS", " ".join(options))
    if ARCHIVES["kafka"].exists():
        _broker._JVM = (*_broker._JVM, f"-XX:SharedArchiveFile={ARCHIVES['kafka']}")
    # Every test has a database of its own, of 300 files: to make them in memory takes a tenth of the processor time and
    # of the wait that it takes on a disk. What servers write here need not outlive the machine; it does outlive their
    # kills. A small machine, a container's small /dev/shm and whoever sets TMPDIR keep them where they were.
    if (
        in_memory
        and "TMPDIR" not in os.environ
        and os.access(_MEMORY, os.W_OK | os.X_OK)
        and shutil.disk_usage(_MEMORY).free >= 6 << 30
        and psutil.virtual_memory().available >= 10 << 30
    ):
        _dirs.tempfile = SimpleNamespace(  # type: ignore[assignment]
            gettempdir=lambda: str(_MEMORY), mkdtemp=tempfile.mkdtemp
        )
