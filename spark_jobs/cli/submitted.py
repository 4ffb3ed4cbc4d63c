"""The file that spark-submit runs on the driver: the ``outbox`` command; see docs/operations/scheduling.md.

outbox-kafka[spark] must be installed where the driver runs.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path


def run() -> None:
    """Run the command line that spark-submit was given."""
    # Python puts this file's folder first on the path; its modules must not be importable under bare names.
    here = Path(__file__).resolve().parent
    if here.name == "cli":
        sys.path[:] = [path for path in sys.path if not path or Path(path).resolve() != here]
    try:
        from relay.cli import main
    except ModuleNotFoundError as error:
        sys.exit(f"outbox: {error.name} is not installed on the driver; run: pip install 'outbox-kafka[spark]'")
    threading.Thread(target=_end_with_spark, args=(os.getppid(),), name="end-with-spark", daemon=True).start()
    main()


def _end_with_spark(parent: int) -> None:
    """End the driver when its JVM is gone: it can do nothing more, and nothing else would end it."""
    from outbox._app.ending import die

    pause = threading.Event()
    while os.getppid() == parent:
        pause.wait(1.0)
    die("Spark's JVM has ended; nothing is lost, run the job again")


if __name__ == "__main__":
    run()
