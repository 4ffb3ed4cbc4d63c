"""All groups of commands, put together. Heavy libraries are imported inside the commands."""

from __future__ import annotations

from typing import Annotated

import typer

from outbox import __version__
from relay.cli import cdc, consume, consumers, db, demo, doctor, external, failures, offsets, relay, sandbox, spark

app = typer.Typer(
    name="outbox",
    help="Events from Postgres to Kafka to the sink's tables: once, in order per key.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=True,
)
app.add_typer(relay.app, name="relay")
app.add_typer(db.app, name="db")
app.add_typer(cdc.app, name="cdc")
app.add_typer(sandbox.app, name="sandbox")
app.add_typer(spark.app, name="spark")
app.add_typer(failures.app, name="failures")
app.add_typer(consumers.app, name="consumers")
app.add_typer(offsets.app, name="offsets")
app.add_typer(external.app, name="external")
app.command("doctor")(doctor.doctor)
app.command("replay")(failures.replay)
app.command("consume")(consume.consume)
app.command("demo")(demo.demo)


def _version(show: bool) -> None:
    if show:
        typer.echo(f"outbox {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    _version_option: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass
