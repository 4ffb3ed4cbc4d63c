"""``outbox doctor``: checks whether Postgres and Kafka are set up for the chosen delivery."""

from __future__ import annotations

import shutil
import textwrap
from typing import Annotated, Final

import typer

from outbox._app.console import AsJson, DatabaseUrl, print_json, printable
from outbox._clients.checks import Level
from relay.cli.session import SinkOption, load_with_sink

_INDENT: Final = " " * len("failure  ")


def doctor(
    delivery: Annotated[str | None, typer.Option(help="at-most-once, at-least-once or exactly-once")] = None,
    database_url: DatabaseUrl = None,
    sink_url: SinkOption = None,
    as_json: AsJson = False,
) -> None:
    """Explain the chosen delivery, check Postgres and Kafka for it, and derive the guarantee for each lane and group.

    Checks for which this role lacks a right are named and skipped. Exit status 1 for a failure.
    """
    from relay.operations.doctor import examine

    settings = load_with_sink(database_url, sink_url, delivery=delivery)
    settings.require_database()
    settings.require_kafka()
    findings = list(examine(settings))
    if as_json:
        print_json({"delivery": settings.delivery, "findings": findings})
    else:
        colours = {Level.OK: "green", Level.WARNING: "yellow", Level.FAILURE: "red"}
        for finding in findings:
            level = typer.style(f"{finding.level:<{len(_INDENT)}}", fg=colours[finding.level])
            typer.echo(level + typer.style(printable(finding.about), bold=True))
            typer.echo(_wrapped(finding.found))
            if finding.do:
                typer.echo(_wrapped(f"→ {finding.do}"))
    if any(finding.level is Level.FAILURE for finding in findings):
        raise typer.Exit(1)


def _wrapped(text: str) -> str:
    """Return a text below the name of its finding, as wide as the terminal. Words are not cut, so that they can be
    copied.
    """
    return textwrap.fill(
        printable(text),
        shutil.get_terminal_size().columns,
        initial_indent=_INDENT,
        subsequent_indent=_INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )
