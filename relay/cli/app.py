"""The whole command line, for tests and for programs that call it."""

from __future__ import annotations

from relay.cli.assembly import assemble

app = assemble()
