"""The ``outbox`` command: the composition root, the one place that knows every part."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line. A core install has no typer; say what to install instead of failing on the import."""
    try:
        from relay.cli.assembly import assemble

        app = assemble(sys.argv[1:])
    except ModuleNotFoundError as error:
        sys.exit(f"outbox: {error.name} is not installed; run: pip install 'outbox-kafka[relay]'")
    app()
