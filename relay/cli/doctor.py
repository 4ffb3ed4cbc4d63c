"""``outbox doctor``: checks whether Postgres and Kafka are set up for the chosen delivery."""

from __future__ import annotations

from typing import Annotated

import typer

from outbox._app.console import AsJson, DatabaseUrl, failing_clearly, print_json, printable
from relay.cli.status import SinkOption
from relay.config import load


@failing_clearly
def doctor(
    delivery: Annotated[str | None, typer.Option(help="at-most-once, at-least-once or exactly-once")] = None,
    database_url: DatabaseUrl = None,
    sink_url: SinkOption = None,
    as_json: AsJson = False,
) -> None:
    """Explain the chosen delivery, check Postgres and Kafka for it, and derive the guarantee for each lane and group.

    Checks for which this role lacks a right are named and skipped. Exit status 1 for a failure.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from outbox._clients.checks import Level
    from relay.operations.doctor import examine

    settings = load(database_url=database_url, delivery=delivery)
    settings.require_database()
    settings.require_kafka()
    findings = list(examine(settings, sink_url))
    if as_json:
        print_json({"delivery": settings.delivery, "findings": findings})
    else:
        table = Table("", "about", "found", "what to do", show_lines=True)
        colours = {Level.OK: "green", Level.WARNING: "yellow", Level.FAILURE: "red"}
        for finding in findings:
            texts = (Text(printable(text), overflow="fold") for text in (finding.about, finding.found, finding.do))
            table.add_row(Text(finding.level, style=colours[finding.level]), *texts)
        Console().print(table)
    if any(finding.level is Level.FAILURE for finding in findings):
        raise typer.Exit(1)
