"""`outbox web --open`: what the browser is given, and what stays behind of it."""

from __future__ import annotations

import html
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from page_access import environment, serve

from outbox.sandbox._process import patience
from relay.page import security

__all__ = ["environment", "serve"]

BROWSER = f"""#!{sys.executable}
import sys, pathlib
pathlib.Path(__file__).with_name("given").write_text("\\n".join(sys.argv[1:]))
"""


def token_of(link: str) -> str:
    return urlsplit(link).query.removeprefix("token=")


def test_open_leaves_no_token_behind(environment, tmp_path):
    browser, given = tmp_path / "browser", tmp_path / "given"
    browser.write_text(BROWSER)
    browser.chmod(0o700)
    os.mkfifo(given)
    with subprocess.Popen(
        [Path(sys.executable).with_name("outbox"), "web", "--open", "--address", "127.0.0.1:0"],
        env=os.environ | {"DISPLAY": ":0", "BROWSER": f"{browser} %s", "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            printed = process.stdout.readline()
            arguments = given.read_text()
            token = token_of(printed.split()[-1])
            assert len(token) > 20
            file = Path(url2pathname(urlsplit(arguments).path))
            assert file.stat().st_mode & 0o077 == 0
            (link,) = re.findall(r"url=([^\"]+)", file.read_text())
            link = html.unescape(link)
            assert link.partition("?")[0] == printed.split()[-1].partition("?")[0]
            # What the browser's history has is not the token, which is valid until the page ends.
            assert token_of(link) != token
            assert not any(one in arguments for one in (token, token_of(link)))
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(20 * patience())


def test_a_link_to_open_is_valid_once_and_soon(serve, monkeypatch):
    page = serve()

    def exchanged(link: str) -> bool:
        found = page.ask("/?" + urlsplit(link).query)
        assert found.status in {200, 403}
        return "set-cookie" in found.headers

    link = page.server.link_to_open()
    assert [exchanged(link) for _ in range(2)] == [True, False]
    # The last one counts, and the printed one remains valid.
    earlier, later = page.server.link_to_open(), page.server.link_to_open()
    assert [exchanged(one) for one in (earlier, page.link, later, later)] == [False, True, True, False]
    monkeypatch.setattr(security, "_ONCE_SECONDS", 0)
    assert not exchanged(page.server.link_to_open())


def test_behind_a_proxy_there_is_no_token_to_open(serve):
    page = serve(proxy_secret="s3cret-of-the-proxy", origin="https://outbox.example.com")
    assert page.server.link_to_open() == page.link == "https://outbox.example.com/"
