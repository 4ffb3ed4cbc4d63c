"""Settings of the person who runs the tests are not the tests'."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from class_archives import ARCHIVES, QUIET
from hypothesis import settings

from outbox.testing import _broker

# The same examples in every run: what fails, fails for everybody.
settings.register_profile("tests", derandomize=True, database=None)
settings.load_profile("tests")

# The two addresses choose the servers that the fixtures use; everything else would change what is tested.
for _name in list(os.environ):
    if _name.startswith("OUTBOX_") and _name not in {
        "OUTBOX_DATABASE_URL",
        "OUTBOX_KAFKA__BOOTSTRAP_SERVERS",
        "OUTBOX_CACHE",
        "OUTBOX_PG_BIN",
        "OUTBOX_MAVEN_REPOSITORY",
        "OUTBOX_PATIENCE",
    }:
        del os.environ[_name]

# A time limit costs nothing where a test passes, and everything where the machine is slow.
os.environ.setdefault("OUTBOX_PATIENCE", "4")

# Short lives: the second compiler of a JVM, which Spark and Kafka start with, takes half of all processor time.
_options = ["-XX:TieredStopAtLevel=1"]
if ARCHIVES["spark"].exists():
    _options += [f'-XX:SharedArchiveFile="{ARCHIVES["spark"]}"', *QUIET]
os.environ.setdefault("JDK_JAVA_OPTIONS", " ".join(_options))
if ARCHIVES["kafka"].exists():
    _broker._JVM = (*_broker._JVM, f"-XX:SharedArchiveFile={ARCHIVES['kafka']}")
