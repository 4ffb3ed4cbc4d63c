"""Open a link in the reader's own browser."""

from __future__ import annotations

import html
import os
import sys
import tempfile
from pathlib import Path


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
