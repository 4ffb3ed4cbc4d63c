"""Open a link in the reader's own browser."""

from __future__ import annotations

import os
import sys


def open_in_browser(link: str) -> bool:
    """Open a link in a browser with windows, if there is one. Returns whether there is."""
    import webbrowser

    # A browser for terminals would take ours.
    windows = sys.platform in {"darwin", "win32"} or "DISPLAY" in os.environ or "WAYLAND_DISPLAY" in os.environ
    return windows and webbrowser.open(link)
