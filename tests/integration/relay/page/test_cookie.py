"""What a real browser sends to other sites of the same machine: cookies know no ports."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from page_access import environment, serve
from page_support import browser

__all__ = ["environment", "serve"]

SITE = b"""<!doctype html><title>another site</title><img src="/image"><img src="/"><img src="/live">"""


@pytest.fixture
def site() -> Iterator[tuple[int, dict[str, str]]]:
    """Serve a site of another user of the machine. Yields its port, and the headers of its requests by path."""
    seen: dict[str, str] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen[self.path] = str(self.headers)
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(SITE)

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1], seen
        server.shutdown()
        thread.join()


def test_no_other_site_of_the_machine_gets_the_cookie(serve, site):
    page = serve()
    port, seen = site
    with browser() as chromium:
        tab = chromium.new_page()
        tab.goto(page.link)
        tab.get_by_role("heading", level=1, name="Overview").wait_for()
        # A link that leads there, too: it must not learn the path at which it would get the cookie.
        tab.evaluate(f"location.href = 'http://127.0.0.1:{port}/link'")
        tab.wait_for_url("**/link")
        tab.goto(f"http://127.0.0.1:{port}/site")
        assert {"/", "/live", "/image", "/link", "/site"} <= seen.keys()
        for path, headers in seen.items():
            assert "cookie" not in headers.lower(), path
            assert page.base.strip("/") not in headers, path
        # It is still the browser's, for the page itself.
        answer = tab.goto(f"http://{page.address}{page.base}/events")
        assert answer is not None
        assert answer.status == 200
