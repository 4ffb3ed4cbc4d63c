"""``outbox contracts``: what a new version of a service's events breaks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outbox._app.console import AsJson, failing_clearly, print_json, printable

app = typer.Typer(help="The contract with consumers, as `outbox asyncapi` prints it.", no_args_is_help=True)


@app.command()
@failing_clearly
def check(
    old: Annotated[Path, typer.Argument(help="The document that consumers know.")],
    new: Annotated[Path, typer.Argument(help="The document of the next version.")],
    as_json: AsJson = False,
) -> None:
    """Compare two AsyncAPI documents, and name each change that breaks a reader of old or of new events.

    Exit status 1 for a change that breaks, 2 for a document that can't be read.
    """
    from relay.operations.contracts import compare, read

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
