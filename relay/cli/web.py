"""``outbox web``: serve the operations page."""

from __future__ import annotations

from typing import Annotated

import typer

from outbox._app.console import DatabaseUrl, failing_clearly
from outbox.errors import MissingExtra
from relay.cli.status import SinkOption, load_with_sink


@failing_clearly
def web(
    database_url: DatabaseUrl = None,
    sink_url: SinkOption = None,
    address: Annotated[str | None, typer.Option("--address", help="OUTBOX_WEB__ADDRESS")] = None,
    open_browser: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Serve a page that shows the pipeline and lets an operator retry, discard, pause and resume.

    Other addresses than loopback need a proxy that authenticates its users; see docs/operations/page.md.
    """
    try:
        from relay.page.server import PageServer
    except ModuleNotFoundError as error:
        raise MissingExtra("web", error.name or "starlette") from error
    from outbox._app import logs

    settings = load_with_sink(database_url, sink_url, web=None if address is None else {"address": address})
    logs.configure(settings.log_level, settings.log_format)
    server = PageServer(settings)

    def announce() -> None:
        # The token in it is the key to the page: for the terminal, not for the log.
        typer.echo(f"the page is at {server.link}")
        if open_browser:
            from relay.cli.browser import open_in_browser

            if not open_in_browser(server.link_to_open()):
                typer.echo("no graphical browser was found: open the link by hand", err=True)

    server.run(announce)
