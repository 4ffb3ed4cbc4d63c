"""The operations page in a real browser, over what a real relay and a real consumer have done.

With TEST_SCREENSHOTS=FOLDER the views are written there as pictures: `make screenshots`.
"""

from __future__ import annotations

import json
import re
import secrets
from typing import Any

import psycopg
import pytest
from page_support import DESKTOP, PHONE, PageRun, Seen, browser
from support import drained, wait_until, write

from outbox import Event

pytestmark = pytest.mark.spark

KIND = "Order"
LARGE = 3


@pytest.fixture(scope="module")
def chromium():
    with browser() as started:
        yield started


class Shop:
    """Writes orders, good ones and bad ones, into bench's outbox."""

    def __init__(self, bench: Any) -> None:
        self.url = bench.database.url
        self.small = bench.topics.create_topic(bench.topics.name("small"), 1, {"max.message.bytes": "2000"})
        self.routes = json.dumps({KIND: {"topic": bench.topic}, "Photo": {"topic": self.small}})
        self._number = 0

    def orders(self, count: int) -> list[str]:
        events = []
        for _ in range(count):
            self._number += 1
            payload = {"order_id": f"o{self._number % 7}", "seq": self._number, "customer": "c", "amount_cents": 5}
            events.append(Event(KIND, f"o{self._number % 7}", "order.placed", payload | {"status": "new"}))
        return self._write(events)

    def undecodable(self) -> str:
        return self._write([Event(KIND, "o1", "order.placed", {"order_id": 17, "note": "<b>bold</b> [red]\x07"})])[0]

    def too_large(self) -> list[str]:
        photo = {"pixels": secrets.token_hex(3_000)}
        return self._write([Event("Photo", f"p{n}", "photo.taken", photo) for n in range(LARGE)])

    def _write(self, events: list[Event]) -> list[str]:
        return list(map(str, write(self.url, events)))


@pytest.fixture
def shop(bench, monkeypatch):
    made = Shop(bench)
    monkeypatch.setenv("OUTBOX_DATABASE_URL", made.url)
    monkeypatch.setenv("OUTBOX_KAFKA__BOOTSTRAP_SERVERS", bench.topics.bootstrap_servers)
    monkeypatch.setenv("OUTBOX_ROUTES", made.routes)
    return made


@pytest.fixture
def page(shop):
    # A page that is open asks so often, and each answer costs the browser and us processor time.
    served = PageRun(refresh_seconds=1.0)
    yield served
    served.close()


def failed(url: str) -> int:
    with psycopg.connect(url) as connection:
        return int(connection.execute("SELECT count(*) FROM outbox.dead_letters").fetchall()[0][0])


def test_every_view_shows_what_there_is_and_an_operator_acts_on_it(bench, shop, page, chromium, outbox_relay):
    ids = shop.orders(300)
    bad, photos = shop.undecodable(), shop.too_large()
    outbox_relay(routes=shop.routes, relay__archive_days=3, failures__max_attempts=1)
    wait_until(lambda: failed(shop.url) == LARGE, what="the photos to fail")
    drained(shop.url)
    totals = bench.once()
    assert (totals.applied, totals.dead) == (300, 1)
    seen = Seen(chromium, page, viewport=DESKTOP)
    tab = seen.tab
    # Overview, and that it moves by itself.
    tab.get_by_text("2 things need attention").wait_for()
    seen.check()
    shop.orders(20)
    drained(shop.url)
    assert bench.once().applied == 20
    applied = tab.locator("table").nth(1).locator("tbody td").nth(6)
    applied.get_by_text("320", exact=True).wait_for()
    assert tab.locator("polyline").count() >= 4
    tab.get_by_text("written to applied").first.wait_for()
    for label in ("Topics", "Events", "Dead letters", "Relays", "Consumers", "System", "Audit", "Overview"):
        seen.click("link", label, exact=True)
        tab.get_by_role("heading", level=1, name=label).wait_for()
        assert tab.locator("header nav [aria-current]").inner_text() == label
    seen.picture("overview")
    assert bench.topic in seen.open("/topics").inner_text("table")
    assert re.search(rf"{shop.small} Pause…\s+Photo\s+0", seen.text("table"))
    # Events: pages, one key, one event.
    rows = seen.open("/events?state=published").locator("tbody tr")
    assert rows.count() == 50
    newest = rows.first.inner_text()
    seen.click("link", "Older events")
    assert rows.count() == 50
    assert rows.first.inner_text() != newest
    seen.open("/events?state=dead&type=Photo")
    assert rows.count() == LARGE
    tab.get_by_label("Event id").fill(f"{KIND}/o3")
    seen.click("button", "Find")
    assert rows.count() > 40
    tab.get_by_label("Event id").fill(ids[0])
    seen.enter()
    tab.get_by_text("group order-totals: applied").wait_for()
    assert "published" in seen.text(".trace")
    assert '"order_id": "o1"' in seen.text("pre")
    seen.check()
    seen.picture("event")
    seen.open(f"/events/{bad}")
    assert "field order_id: is not a text" in seen.text(".trace")
    # What others have written is text, and control characters are shown.
    assert r"<b>bold</b> [red]\x07" in seen.text("pre").replace(r"\u0007", r"\x07")
    # Dead letters of both sides.
    text = seen.open("/dead-letters").inner_text("main")
    assert "the broker takes no message of this size" in text
    assert "undecodable" in text
    seen.picture("dead-letters")
    seen.open(f"/dead-letters/relay/{photos[0]}")
    assert "0 later events of its key" in seen.text(".pairs")
    tab.goto(f"http://{page.address}{page.base}/dead-letters")
    seen.click("link", "field order_id: is not a text")
    seen.click("link", "1", exact=True)
    assert "order-totals" in seen.text(".pairs")
    assert bad in seen.text("table")
    seen.check()
    # Consumers, system, audit.
    seen.open("/consumers")
    seen.click("link", "order-totals", exact=True)
    assert f"{bench.topic}-0" in seen.text("table")
    seen.check()
    text = seen.open("/system").inner_text("main")
    assert "published" in text
    assert "processed_messages" in text
    assert "OUTBOX_KAFKA" in text
    assert psycopg.conninfo.conninfo_to_dict(shop.url).get("password", "no password") not in text
    seen.open("/relays")
    assert "no replication slot" in seen.text()
    seen.open("/audit?side=consumer")
    seen.close()
    # In the dark and on a phone.
    seen = Seen(chromium, page, viewport=PHONE, color_scheme="dark", has_touch=True)
    seen.tab.get_by_text("things need attention").wait_for()
    dark = seen.tab.evaluate("getComputedStyle(document.body).backgroundColor")
    seen.check()
    seen.picture("phone")
    for path in ("/topics", "/events", "/dead-letters", "/dead-letters/consumer/1", "/relays", "/consumers", "/system"):
        seen.open(path)
    seen.tab.emulate_media(color_scheme="light")
    assert seen.tab.evaluate("getComputedStyle(document.body).backgroundColor") != dark
    seen.close()
    act_by_keyboard(bench, shop, page, chromium, photos)


def act_by_keyboard(bench: Any, shop: Shop, page: PageRun, chromium: Any, photos: list[str]) -> None:
    """Retry and discard what there is."""
    seen = Seen(chromium, page, viewport=DESKTOP)
    tab = seen.tab
    keys = tab.keyboard
    # The first stop leads past the navigation.
    keys.press("Tab")
    assert tab.evaluate("document.activeElement.textContent") == "Skip to the content"
    keys.press("Enter")
    assert tab.evaluate("document.activeElement.id") == "content"
    # One event is tried again: it fails once more, as the topic still takes no such message.
    seen.open(f"/dead-letters/relay/{photos[0]}")
    tab.get_by_role("button", name="Retry").focus()
    seen.enter()
    tab.get_by_text("1 event will be retried").wait_for()
    wait_until(lambda: failed(shop.url) == LARGE, what="the photo to fail again")
    # All of a group are discarded: first what that would do, with the reason, and nothing is changed.
    tab.goto(f"http://{page.address}{page.base}/dead-letters")
    tab.get_by_role("link", name="the broker takes no message of this size").focus()
    seen.enter()
    tab.get_by_label("Reason", exact=True).focus()
    keys.type("photos go elsewhere")
    seen.enter()
    tab.get_by_text(f"{LARGE} dead letters would be discarded for good").wait_for()
    seen.check()
    assert failed(shop.url) == LARGE
    tab.get_by_role("button", name="Discard").focus()
    seen.enter()
    tab.get_by_text(f"{LARGE} events were discarded").wait_for()
    assert failed(shop.url) == 0
    # The consumers' side.
    seen.click("link", "field order_id: is not a text")
    seen.click("button", "Retry all of these")
    tab.get_by_text("1 message would be retried").wait_for()
    seen.click("button", "Retry")
    tab.get_by_text("1 message will be retried in the next round of their groups").wait_for()
    bench.once()
    seen.open("/dead-letters/consumer/1")
    assert re.search(r"Attempts\s+2", seen.text(".pairs"))
    tab.get_by_label("Reason", exact=True).fill("seen to by hand")
    seen.click("button", "Discard")
    seen.click("button", "Discard")
    tab.get_by_text("1 message was discarded").wait_for()
    # The audit has who, what and why; "who" is not the browser's to choose.
    text = seen.open("/audit").inner_text("table")
    for line in ("page: discard dead letters", "photos go elsewhere", "page: retry dead letters", "local"):
        assert line in text
    assert "page: discard messages" in text
    assert "discard dead letter" in seen.open("/audit?side=consumer").inner_text("table")
    seen.close()
