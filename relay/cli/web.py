"""``outbox web``: serve the operations page."""

from __future__ import annotations

import html
import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from outbox._app.console import DatabaseUrl
from outbox.errors import MissingExtra
from relay.cli.session import SinkOption, load_with_sink


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
    logs.configure(settings.log_level, settings.log_format, settings.given_name)
    server = PageServer(settings)

    def announce() -> None:
        # The token in it is the key to the page: for the terminal, not for the log.
        typer.echo(f"the page is at {server.link}")
        if open_browser and not open_in_browser(server.link_to_open()):
            typer.echo("no graphical browser was found: open the link by hand", err=True)

    server.run(announce)


def open_in_browser(link: str) -> bool:
    """Open a link in a browser with windows, if there is one. Returns whether there is.

    The link has a token in it, and every user of a machine can read the arguments of a process, and be faster than the
    browser: the browser is given a file that leads on, which only this user can read.
    """
    import webbrowser

    # A browser for terminals would take ours.
    if sys.platform not in {"darwin", "win32"} and not {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys():
        return False
    descriptor, name = tempfile.mkstemp(prefix="outbox-page-", suffix=".html")
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(f'<!doctype html><meta http-equiv="refresh" content="0;url={html.escape(link)}">')
    return webbrowser.open(Path(name).as_uri())
