"""The operations page, served by real HTTP from a thread, and a real browser that opens it."""

from __future__ import annotations

import http.client
import os
import re
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlencode, urlsplit

import pytest

from relay.config import load
from relay.page.security import Role, User
from relay.page.server import PageServer

DESKTOP = {"width": 1280, "height": 860}
PHONE = {"width": 390, "height": 844}


@dataclass(frozen=True)
class Answer:
    """What the page answered."""

    status: int
    headers: Mapping[str, str]
    text: str

    @property
    def form_token(self) -> str:
        """Return the token of the first form in it."""
        found = re.search(r'name="form_token" value="([0-9a-f]+)"', self.text)
        assert found is not None, self.text
        return found[1]


class PageRun:
    """A page that is served until ``close``. Its settings are those of the environment, and ``web``."""

    def __init__(self, sink_url: str | None = None, **web: Any) -> None:
        given = {"web": {"address": "127.0.0.1:0", "refresh_seconds": 0.3, "payloads": "shown"} | web}
        self.server = PageServer(load(relay=None if sink_url is None else {"sink_url": sink_url}, **given))
        self.link = self.server.link
        self.port = self.server.port
        self.base = urlsplit(self.link).path.removesuffix("/")
        self.address = f"127.0.0.1:{self.port}"
        ready = threading.Event()
        self._thread = threading.Thread(target=self.server.run, args=(ready.set,))
        self._thread.start()
        self.cookie: str | None = None
        assert ready.wait(30)

    def ask(
        self,
        path: str,
        fields: Mapping[str, Any] | None = None,
        headers: Mapping[str, str | bytes] | None = None,
        method: str | None = None,
        body: bytes | None = None,
    ) -> Answer:
        """Send one request, with the cookie once there is one. ``fields``: a form, from our own origin.

        ``path`` is one below the page's, or what the page leads to.
        """
        if not path.startswith(f"{self.base}/"):
            path = f"{self.base}{path}"
        sent: dict[str, str | bytes] = {"Host": self.address}
        if self.cookie is not None:
            sent["Cookie"] = self.cookie
        if fields is not None:
            body = urlencode(fields, doseq=True).encode()
            sent |= {"Content-Type": "application/x-www-form-urlencoded", "Origin": f"http://{self.address}"}
        sent |= headers or {}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.putrequest(method or ("GET" if body is None else "POST"), path, skip_host=True)
            for name, value in sent.items():
                if value:
                    connection.putheader(name, value)
            if body is not None:
                connection.putheader("Content-Length", str(len(body)))
            connection.endheaders(body)
            answer = connection.getresponse()
            return Answer(answer.status, dict(answer.getheaders()), answer.read().decode())
        finally:
            connection.close()

    def sign_in(self) -> Self:
        """Exchange the link's token for the cookie."""
        found = self.ask("/?" + urlsplit(self.link).query)
        assert f'content="0;url={self.base}/"' in found.text, found
        self.cookie = found.headers["set-cookie"].partition(";")[0]
        return self

    def act(self, path: str, **fields: Any) -> Answer:
        """Send a form with its token, say yes if that is asked, and follow to the page that says what was done."""
        found = self.ask(path, {"form_token": self.form_token(), **fields})
        if (key := re.search(r'name="confirmed" value="([^"]+)"', found.text)) is not None:
            found = self.ask(path, {"form_token": self.form_token(), **fields, "confirmed": key[1]})
        return self.ask(found.headers["location"]) if found.status == 303 else found

    def form_token(self) -> str:
        """Return the token of the forms of whoever has the link."""
        return self.server.access.form_token(User("local", Role.ADMIN))

    def close(self) -> None:
        """Stop serving."""
        self.server.stop()
        self._thread.join(30)
        assert not self._thread.is_alive()


class Seen:
    """The page in a browser's tab: every view that is opened has to fit, and the console has to stay empty."""

    def __init__(self, chromium: Any, page: PageRun, **options: Any) -> None:
        self.page = page
        self._context = chromium.new_context(**options)
        self.tab = self._context.new_page()
        self.said: list[str] = []
        self.tab.on("console", lambda message: self.said.append(message.text))
        self.tab.on("pageerror", lambda error: self.said.append(str(error)))
        self.tab.goto(page.link)
        # The token does not stay in the address.
        self.tab.wait_for_url(f"http://{page.address}{page.base}/")

    def open(self, path: str, status: int = 200) -> Any:
        """Open a view, and return the tab."""
        answer = self.tab.goto(f"http://{self.page.address}{self.page.base}{path}")
        assert answer.status == status, path
        self.fits()
        return self.tab

    def click(self, role: Any, name: str, exact: bool = False) -> None:
        """Click on what leads to another view, and wait until that is there: a click alone waits for nothing."""
        with self.tab.expect_navigation():
            self.tab.get_by_role(role, name=name, exact=exact).click()

    def enter(self) -> None:
        """Press the key that sends the form or follows the link that has the focus, and wait likewise."""
        with self.tab.expect_navigation():
            self.tab.keyboard.press("Enter")

    def check(self) -> None:
        """Check what is shown by axe, which takes a third of a second, and that it fits."""
        from axe_playwright_python.sync_playwright import Axe

        found = Axe().run(self.tab).response["violations"]
        assert not found, [(one["id"], [node["html"] for node in one["nodes"]]) for one in found]
        self.fits()

    def fits(self) -> None:
        """Check that nothing is wider than the screen but what scrolls by itself."""
        width = self.tab.evaluate("document.documentElement.scrollWidth")
        assert width <= self.tab.viewport_size["width"], self.tab.url

    def text(self, selector: str = "main") -> str:
        """Return the text of an element."""
        return str(self.tab.inner_text(selector))

    def picture(self, name: str) -> None:
        """Write what is shown as a picture, see ``picture``."""
        picture(self.tab, name)

    def close(self) -> None:
        """End it. Nothing was written to the console."""
        self._context.close()
        assert self.said == []


def picture(tab: Any, name: str) -> None:
    """Write what a tab shows into the folder TEST_SCREENSHOTS, if there is one: `make screenshots`."""
    if folder := os.environ.get("TEST_SCREENSHOTS"):
        tab.screenshot(path=str(Path(folder, f"{name}.png")))


@contextmanager
def browser() -> Iterator[Any]:
    """Start Debian's chromium, driven by playwright. Skips the test where there is none."""
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium")
    if program is None:
        pytest.skip("chromium is not installed: apt-get install chromium")
    with sync_playwright() as driver:
        # As root, chromium has no sandbox of its own; it opens only our page. A container's /dev/shm may be too small.
        options = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        started = driver.chromium.launch(executable_path=program, args=options)
        try:
            yield started
        finally:
            started.close()
