"""`outbox web`: it serves the page until a signal; with `--open`, what the browser is given and what stays behind."""

from __future__ import annotations

import html
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import HTTPCookieProcessor, build_opener, url2pathname

from page_access import environment, serve

from relay.page import security

__all__ = ["environment", "serve"]

BROWSER = f"""#!{sys.executable}
import sys, pathlib
pathlib.Path(__file__).with_name("given").write_text("\\n".join(sys.argv[1:]))
"""


def token_of(link: str) -> str:
    return urlsplit(link).query.removeprefix("token=")


def test_the_command_opens_the_page_serves_it_until_it_is_told_to_end_and_leaves_no_token_behind(environment, tmp_path):
    browser, given = tmp_path / "browser", tmp_path / "given"
    browser.write_text(BROWSER)
    browser.chmod(0o700)
    os.mkfifo(given)
    process = subprocess.Popen(
        [Path(sys.executable).with_name("outbox"), "web", "--open", "--address", "127.0.0.1:0"],
        env=os.environ | {"DISPLAY": ":0", "BROWSER": f"{browser} %s", "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        link = process.stdout.readline().removeprefix("the page is at ").strip()
        token, address = token_of(link), link.partition("/?")[0]
        assert len(token) > 20
        arguments = given.read_text()
        file = Path(url2pathname(urlsplit(arguments).path))
        assert file.stat().st_mode & 0o077 == 0
        (opened,) = map(html.unescape, re.findall(r"url=([^\"]+)", file.read_text()))
        assert opened.partition("/?")[0] == address
        # What the browser's history has is not the token, which is valid until the page ends.
        assert token_of(opened) != token
        assert not any(one in arguments for one in (token, token_of(opened)))
        client = build_opener(HTTPCookieProcessor())
        client.open(link, timeout=60).close()
        with client.open(f"{address}/", timeout=60) as answer:
            assert "Overview" in answer.read().decode()
        # A live connection does not keep it from ending.
        with client.open(f"{address}/live", timeout=60) as live:
            live.readline()
            began = time.monotonic()
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=60)
        assert time.monotonic() - began < 30
    finally:
        process.kill()
        process.communicate()
    # Whoever reads the log has no key to the page.
    assert ("Traceback" in errors, token in errors) == (False, False), errors
    assert process.returncode in {0, -signal.SIGTERM}


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
