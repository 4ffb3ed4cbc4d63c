"""``outbox asyncapi``: the document that describes a service's events."""

from __future__ import annotations

from typing import Annotated

import typer

from outbox._app.console import failing_clearly
from relay.config import load


@failing_clearly
def asyncapi(
    models: Annotated[list[str], typer.Option("--models", help="A module that registers event models; repeatable.")],
    title: Annotated[str, typer.Option("--title", help="The document's title.")] = "Events",
    version: Annotated[str, typer.Option("--document-version", help="The document's version.")] = "1.0.0",
) -> None:
    """Print an AsyncAPI 3.0 document (JSON) of the registered events: topics, headers, keys, payloads.

    Needs neither Postgres nor Kafka.
    """
    import json

    from relay.operations.asyncapi import document, import_models

    settings = load()
    typer.echo(json.dumps(document(import_models(models), settings, title, version), indent=2))
