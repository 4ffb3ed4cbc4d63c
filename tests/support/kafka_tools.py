"""``kafka-transactions.sh`` of Kafka's distribution, which the runbooks name, run from the sandbox's jars.

``python tests/support/kafka_tools.py`` writes kafka_tools.lock anew.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from class_archives import ARCHIVES, QUIET

from outbox.sandbox import jars
from outbox.sandbox.java import java
from release.jars import Roots, resolve

LOCK: Final = Path(__file__).with_name("kafka_tools.lock")
ARCHIVE: Final = (f"-XX:SharedArchiveFile={ARCHIVES['kafka']}", *QUIET) if ARCHIVES["kafka"].exists() else ()
_BROKER: Final = next(jar.version for jar in jars.locked(jars.KAFKA) if jar.artifact == "kafka-server")
ROOTS: Final[Roots] = {
    # The broker's jars have everything else that the command needs.
    "tools": (False, (f"org.apache.kafka:kafka-tools:{_BROKER}", "net.sourceforge.argparse4j:argparse4j:0.7.0"))
}


def kafka_transactions(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run ``kafka-transactions.sh`` with these arguments."""
    path = os.pathsep.join(map(str, [*jars.fetch(jars.KAFKA), *jars.fetch("tools", lock=LOCK)]))
    # A short run spends most of its time in the compiler, and on loading classes: most of them are the broker's.
    short = ["-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", *ARCHIVE]
    command = [java(), *short, "-cp", path, "org.apache.kafka.tools.TransactionsCommand", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


if __name__ == "__main__":
    heading = (
        "Kafka's command for transactions, for runbooks: Maven coordinates, SHA-256, size in bytes.",
        "Written by: python tests/support/kafka_tools.py",
    )
    LOCK.write_text(resolve(ROOTS, heading))
