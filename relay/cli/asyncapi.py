"""``outbox asyncapi``: the document that describes a service's events."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from outbox._app.console import failing_clearly
from relay.config import load


class Format(StrEnum):
    YAML = "yaml"
    JSON = "json"


@failing_clearly
def asyncapi(
    models: Annotated[list[str], typer.Option("--models", help="A module that registers event models; repeatable.")],
    title: Annotated[str, typer.Option("--title", help="The document's title.")] = "Events",
    version: Annotated[str, typer.Option("--document-version", help="The document's version.")] = "1.0.0",
    form: Annotated[Format, typer.Option("--format", help="The document's format.")] = Format.YAML,
) -> None:
    """Print an AsyncAPI 3.0 document of the registered events: topics by the settings' routes, headers, keys, payloads.

    Needs neither Postgres nor Kafka.
    """
    import json

    from relay.operations.asyncapi import document, import_models, yaml

    settings = load()
    made = document(import_models(models), settings, title, version)
    typer.echo(json.dumps(made, indent=2) if form is Format.JSON else yaml(made).rstrip("\n"))
