"""The operations page in a real browser, on a desk and on a phone, over what the tables say."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import psycopg
import pytest
from page_access import environment, failure, failures, serve
from page_support import DESKTOP, PHONE, Seen, browser
from rows_and_roles import put
from support import write

from outbox import Event

__all__ = ["environment", "serve"]

SITE = b"""<!doctype html><title>another site</title><img src="/image"><img src="/"><img src="/live">"""
ERROR = "the broker takes no message of this size: # bytes, and the topic's max.message.bytes is 1,048,588"
VIEWS = (
    *("/", "/topics", "/events", "/dead-letters", "/dead-letters/relay", "/dead-letters/consumer", "/relays"),
    *("/consumers", "/consumers/groups/sums", "/system", "/audit", "/audit?side=consumer"),
)

RELAID = (
    *("/", "/relays", "/dead-letters/relay", "/consumers/groups/sums", "/dead-letters/consumer/1"),
    *("/system", "/audit"),
)
"""Views with all that is laid out in another way on a phone: figures, tables, pairs."""


@pytest.fixture(scope="module")
def chromium() -> Any:
    with browser() as started:
        yield started


@pytest.fixture
def letters(environment) -> str:
    """Seven dead letters of the relay, three of a group."""
    failures(environment, "Order", ERROR, 7)
    with psycopg.connect(environment) as connection:
        place = {"grp": "sums", "topic": "orders"}
        put(connection, "consumer.groups", grp="sums", owner="me")
        put(connection, "consumer.offsets", **place, next_offset=1)
        for offset in (1, 2, 3):
            error = {"reason": "undecodable", "error": f"field {offset} is not a text"}
            put(connection, "consumer.dead_letters", **place, **error, message_offset=offset, message_value=b"{}")
    return environment


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


def test_every_view_is_accessible_and_fits(chromium, serve, letters):
    """On a desk, and where the window is then as narrow as a phone."""
    event_id = failure(letters)
    seen = Seen(chromium, serve().sign_in())
    for path in (*VIEWS, f"/events/{event_id}", f"/dead-letters/relay/{event_id}", "/dead-letters/consumer/1"):
        for screen in (DESKTOP, PHONE):
            seen.tab.set_viewport_size(screen)
            if screen is DESKTOP:
                seen.open(path)
            if screen is DESKTOP or path in RELAID:
                seen.check()
            seen.fits()
            current = seen.tab.locator("header nav [aria-current]").bounding_box()
            assert 0 <= current["x"] <= current["x"] + current["width"] <= screen["width"], path
    seen.close()


def test_seven_letters_are_cards_on_a_phone(chromium, serve, letters):
    seen = Seen(chromium, serve().sign_in(), viewport=PHONE)
    tab = seen.open("/dead-letters/relay")
    labels = tab.evaluate("[...document.querySelector('tbody tr').cells].map((cell) => cell.dataset.label)")
    assert labels == ["Choose", "Event", "Aggregate", "State", "Attempts", "First failure", "Error"]
    assert tab.locator("tbody").bounding_box()["height"] < 7 * 160
    # A figure that is replaced stays a card.
    seen.open("/consumers")
    row = tab.locator("tbody tr").first
    with psycopg.connect(letters) as connection:
        connection.execute("UPDATE consumer.groups SET owner = 'another'")
    tab.get_by_text("another").wait_for()
    assert row.locator("[data-label='Owner']").inner_text() == "another"
    seen.close()


def test_the_chosen_letters_are_acted_on(chromium, serve, letters):
    seen = Seen(chromium, serve().sign_in(), viewport=DESKTOP)
    tab = seen.open("/dead-letters")
    # The group has the name of a real error, and not of a pattern.
    seen.click("link", ERROR.replace("#", "1"))
    assert "Errors such as: " + ERROR.replace("#", "1") in seen.text()
    assert tab.get_by_title("UTC").first.inner_text().endswith("ago")
    seen.click("button", "Retry the chosen")
    assert "give the ids of events, or a group of them" in seen.text()
    assert "400" in seen.said.pop()
    tab.go_back()
    for number in (0, 2):
        tab.get_by_role("checkbox").nth(number).check()
    kept = tab.locator("tbody .id").nth(1).inner_text()
    tab.get_by_label("Reason to discard the chosen").fill("no longer of use")
    seen.enter()
    tab.get_by_text("2 dead letters would be discarded for good").wait_for()
    seen.check()
    seen.click("link", "Cancel", exact=True)
    tab.get_by_role("heading", level=1, name="Dead letters").wait_for()
    seen.click("link", ERROR.replace("#", "1"))
    for number in (0, 2):
        tab.get_by_role("checkbox").nth(number).check()
    seen.click("button", "Retry the chosen")
    tab.get_by_text("2 dead letters would be retried").wait_for()
    seen.click("button", "Retry")
    tab.get_by_text("2 events will be retried").wait_for()
    with psycopg.connect(letters) as connection:
        left = [str(row[0]) for row in connection.execute("SELECT event_id FROM outbox.dead_letters")]
    assert len(left) == 5
    assert kept in left
    # One alone is retried at once.
    seen.open("/dead-letters/relay")
    tab.get_by_role("checkbox").first.check()
    seen.click("button", "Retry the chosen")
    tab.get_by_text("1 event will be retried").wait_for()
    seen.open("/dead-letters/consumer?group=sums&topic=orders&part=0")
    for number in (0, 1):
        tab.get_by_role("checkbox").nth(number).check()
    seen.click("button", "Retry the chosen")
    seen.click("button", "Retry")
    tab.get_by_text("2 messages will be retried in the next round of their groups").wait_for()
    # One word for one state.
    states = seen.open("/dead-letters/consumer").locator("tbody tr td:nth-child(6)").all_inner_texts()
    assert sorted(states) == ["dead", "retrying", "retrying"]
    seen.close()


def test_a_name_is_a_link(chromium, serve, letters):
    seen = Seen(chromium, serve().sign_in(), viewport=DESKTOP)
    tab = seen.tab
    assert "`" not in seen.text()
    tab.get_by_role("alert").or_(tab.get_by_role("status")).get_by_role("link", name="show").first.click()
    tab.get_by_role("heading", name="Events that could not be published").wait_for()
    seen.open("/consumers")
    seen.click("link", "sums", exact=True)
    seen.click("link", "Dead letters of orders-0")
    assert tab.locator("tbody tr").count() == 3
    seen.open("/relays")
    seen.click("link", "Pause lane 2")
    tab.get_by_label("Reason").fill("why")
    seen.click("button", "Pause…")
    tab.get_by_role("heading", name="Pause lane 2?").wait_for()
    seen.close()


def test_contents_are_copied(chromium, serve, letters):
    event_id = failure(letters)
    seen = Seen(chromium, serve().sign_in(), viewport=DESKTOP, permissions=["clipboard-read", "clipboard-write"])
    tab = seen.open(f"/events/{event_id}")
    for number, copied in ((0, event_id), (1, tab.locator("pre").inner_text())):
        tab.locator("button.copy").nth(number).click()
        tab.get_by_role("button", name="Copied").nth(number).wait_for()
        assert tab.evaluate("navigator.clipboard.readText()") == copied
        seen.check()
    seen.close()


def test_charts_have_axes_a_range_and_values_under_the_mouse(chromium, serve, letters):
    write(letters, [Event("Order", f"o{number}", "T", {}) for number in range(20)])
    seen = Seen(chromium, serve().sign_in(), viewport=DESKTOP)
    tab = seen.tab
    chart = tab.locator("figure", has_text="Oldest waiting event by topic")
    chart.locator("polyline").wait_for(state="attached")
    assert "order-events" in chart.locator(".legend").inner_text()
    waiting = tab.locator("figure").first
    assert waiting.locator(".scale span").all_inner_texts() == ["20", "0"]
    times = waiting.locator(".times span").all_inner_texts()
    assert all(len(time) == 8 for time in times)
    assert times == sorted(times)
    column = waiting.locator("rect").last
    column.hover()
    assert "events 20" in column.locator("title").text_content()
    # It stays as long as the mouse is over it.
    shown = column.element_handle()
    for _ in range(2):
        said = tab.inner_text("#live-state")
        tab.wait_for_function("said => document.getElementById('live-state').innerText !== said", arg=said)
    assert shown.evaluate("one => one.isConnected")
    for minutes in (5, 60):
        tab.get_by_role("link", name=f"{minutes} minutes", exact=True).click()
        tab.wait_for_url(f"**/?minutes={minutes}")
        assert tab.locator(".tabs [aria-current]").inner_text() == f"{minutes} minutes"
        seen.check()
    seen.open("/consumers").locator("figure", has_text="Lag by group").wait_for()
    seen.open("/topics").locator("figure", has_text="order-events").wait_for()
    seen.close()


def test_no_other_site_of_the_machine_gets_the_cookie(chromium, serve, site):
    """Cookies know no ports."""
    page = serve()
    port, seen = site
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
    tab.close()
