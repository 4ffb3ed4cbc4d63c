"""The ``outbox`` command."""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> None:
    """Run the command line. In an install without typer, print what to install instead of an ImportError."""
    try:
        try:
            from relay.cli.assembly import assemble

            app = assemble(sys.argv[1:])
        except ModuleNotFoundError as error:
            if _hides(error):
                raise
            sys.exit(f"outbox: {error.name} is not installed; run: pip install 'outbox-kafka[relay]'")
        app()
    except ImportError as error:
        found = _hides(error)
        if found is None:
            raise
        sys.stderr.write(
            f"outbox: {found} hides the package of the same name that belongs to this command; rename yours, or keep "
            "its folder out of PYTHONPATH and start elsewhere\n"
        )
        sys.exit(2)


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
