"""``outbox asyncapi`` and ``outbox contracts``: what a service's events are, and what a new version of them breaks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from outbox._app.console import AsJson, print_json, printable
from relay.config import load
from relay.operations.contracts import compare, read

app = typer.Typer(help="The contract with consumers, as `outbox asyncapi` prints it.", no_args_is_help=True)


@app.command()
def check(
    old: Annotated[Path, typer.Argument(help="The document that consumers know.")],
    new: Annotated[Path, typer.Argument(help="The document of the next version.")],
    as_json: AsJson = False,
) -> None:
    """Compare two AsyncAPI documents, and name each change that breaks a reader of old or of new events.

    Exit status 1 for a change that breaks, 2 for a document that can't be read.
    """
    found = compare(read(old), read(new))
    if as_json:
        print_json({"breaking": [one._asdict() for one in found]})
    else:
        for one in found:
            typer.echo(f"breaking: {printable(str(one))}")
        if not found:
            typer.echo("nothing breaks")
    if found:
        raise typer.Exit(1)


def asyncapi(
    models: Annotated[list[str], typer.Option("--models", help="A module that registers event models; repeatable.")],
    title: Annotated[str, typer.Option("--title", help="The document's title.")] = "Events",
    version: Annotated[str, typer.Option("--document-version", help="The document's version.")] = "1.0.0",
) -> None:
    """Print an AsyncAPI 3.0 document (JSON) of the registered events: topics, headers, keys, payloads.

    Needs neither Postgres nor Kafka.
    """
    from relay.operations.asyncapi import document, import_models

    settings = load()
    typer.echo(json.dumps(document(import_models(models), settings, title, version), indent=2))
