"""What the operations page does when it is acted on, and what it shows meanwhile: over real HTTP."""

from __future__ import annotations

import html
import re
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlencode

import psycopg
from page_access import SECRET, audit, environment, failure, failures, serve
from support import wait_until

__all__ = ["environment", "serve"]


def remaining(url: str) -> dict[tuple[str, str], int]:
    query = "SELECT aggregate_type, last_error, count(*) FROM outbox.dead_letters GROUP BY 1, 2"
    with psycopg.connect(url) as connection:
        return {(kind, error): count for kind, error, count in connection.execute(query)}


def test_what_was_shown_is_what_is_done(serve, environment):
    """More may match by the time somebody says yes; and a group is exactly what was listed, spaces and all."""
    page = serve().sign_in()
    path, token = "/dead-letters/relay/discard", page.form_token()
    failures(environment, "Order", "too large: #", 2)
    fields = {"kind": "too large: N", "type": "Order", "state": "dead", "reason": "gone", "form_token": token}
    asked = page.ask(path, fields)
    assert "2 dead letters would be discarded for good" in asked.text
    failures(environment, "Order", "too large: #", 500)
    key = re.search(r'name="confirmed" value="([^"]+)"', asked.text)
    assert key is not None
    # The answer to a question is none to another one.
    for other in ("/dead-letters/relay/retry", "/dead-letters/consumer/discard", "/relays/change"):
        also = {"scope": "all"}
        assert page.ask(other, fields | also | {"confirmed": key[1]}).status == 400, other
    found = page.ask(path, fields | {"confirmed": key[1]})
    assert "2 events were discarded" in page.ask(found.headers["location"]).text
    assert sum(remaining(environment).values()) == 500
    assert audit(environment)[0][2] == {"user": "local", "which": "events of Order with: too large: N", "count": 2}
    # Once, and not for whoever makes up an answer.
    for made_up in (key[1], "yes"):
        assert page.ask(path, fields | {"confirmed": made_up}).status == 400
    assert page.ask(path, {"reason": "all", "form_token": token}).status == 400
    with psycopg.connect(environment) as connection:
        connection.execute("TRUNCATE outbox.dead_letters")
    # What somebody else's program left: no error, spaces, lines, and more than is compared.
    errors = ["", " ", "a\nb", "x" * 299 + " " + "y" * 50]
    for error in errors:
        failures(environment, "Order ", error, 2)
        failures(environment, "Order", error, 3)
    for row in re.findall(r'href="([^"]*/dead-letters/relay\?[^"]+)"', page.ask("/dead-letters").text):
        listed = page.ask(html.unescape(row))
        sent = {
            name: html.unescape(value)
            for name, value in re.findall(r'type="hidden" name="(\w+)" value="([^"]*)"', listed.text)
        }
        count = listed.text.count('<td><a class="id"')
        # Browsers send line breaks so.
        sent = {name: value.replace("\n", "\r\n") for name, value in sent.items()}
        asked = page.ask(path, sent | {"reason": "gone"})
        assert f"{count} dead letters would be discarded for good" in asked.text, (row, sent, asked.text)
        assert f"{count} events were discarded" in page.act(path, **sent, reason="gone").text
    assert remaining(environment) == {}


def test_a_copy_is_acted_on_without_the_event_whose_id_it_has(serve, environment):
    page = serve().sign_in()
    failures(environment, "Order", "topic 'orders': too large", 1)
    failures(environment, "Order", "topic 'orders-dead': too large", 2)
    with psycopg.connect(environment) as connection:
        connection.execute(
            "UPDATE outbox.dead_letters SET event_id = (SELECT event_id FROM outbox.dead_letters WHERE id = 1), "
            """headers = '{"outbox-dead-letter": "too large"}' WHERE id > 1"""
        )
    path = "/dead-letters/relay/discard"
    group = {"kind": "topic 'orders-dead': too large", "type": "Order", "state": "dead"}
    # One of them by its checkbox, and the other as a group.
    listed = page.ask(f"/dead-letters/relay?{urlencode(group)}").text
    one, _ = re.findall(r'name="event_id" value="([^"]+)"', listed)
    assert "1 event was discarded" in page.act(path, event_id=one, reason="gone").text
    assert "1 event was discarded" in page.act(path, **group, reason="gone").text
    assert remaining(environment) == {("Order", "topic 'orders': too large"): 1}
    missing = {"event_id": "99999/1", "reason": "gone", "form_token": page.form_token()}
    assert "nothing would be discarded" in page.ask(path, missing).text
    assert page.ask(path, {"event_id": "0/x", "reason": "gone", "form_token": page.form_token()}).status == 400


def test_a_lock_keeps_no_other_view_from_being_shown(serve, environment):
    page = serve().sign_in()
    assert page.ask("/relays").status == 200
    with psycopg.connect(environment) as other, ThreadPoolExecutor(45) as pool:
        other.execute("LOCK TABLE outbox.audit IN ACCESS EXCLUSIVE MODE")
        waiting = [pool.submit(page.ask, "/audit") for _ in range(45)]
        wait_until(lambda: sum(one.done() for one in waiting) >= 20, what="those beyond the limit to be refused")
        assert page.ask("/static/page.css").status == 200
        assert page.ask("/relays").status == 200
        other.rollback()
        answers = {one.result().status for one in waiting}
    assert answers == {200, 503}


def test_a_pause_is_asked_about_and_says_which(serve, environment):
    page = serve().sign_in()
    fields = {"form_token": page.form_token(), "reason": "why"}
    for wrong in (
        {},
        {"scope": ""},
        {"scope": "all", "lanes": "3"},
        {"scope": "lane"},
        {"scope": "lane", "lanes": "x"},
    ):
        assert page.ask("/relays/change", fields | wrong).status == 400, wrong
    assert "Pause all lanes?" in page.ask("/relays/change", fields | {"scope": "all"}).text
    assert "Paused" not in page.ask("/relays").text
    assert "all lanes is paused" in page.act("/relays/change", **fields, scope="all").text
    wait_until(lambda: "<h2>Paused</h2>" in page.ask("/relays").text, what="the pause to be shown")


def test_payloads_are_hidden_unless_somebody_wants_them(serve, environment):
    event_id = failure(environment)
    hidden, shown = serve(payloads="hidden").sign_in(), serve().sign_in()
    paths = [f"/events/{event_id}", f"/dead-letters/relay/{event_id}", "/dead-letters", "/dead-letters/relay"]
    for path in paths:
        assert SECRET not in hidden.ask(path).text, path
    for path in paths[:2]:
        assert shown.ask(path).text.count(SECRET) == 2, path


def test_postgres_is_away_for_a_while(private_postgres, serve, monkeypatch):
    """A view says so instead of showing old figures as new ones, and is back by itself."""
    from outbox._app.migrate import upgrade

    server = private_postgres()
    monkeypatch.setenv("OUTBOX_DATABASE_URL", server.url())
    upgrade(server.url())
    page = serve().sign_in()
    assert "no relay is running" in page.ask("/").text
    server.kill()
    wait_until(lambda: "the outbox can&#39;t be seen" in page.ask("/").text, what="the page to notice")
    found = page.ask("/events")
    assert (found.status, "That did not work" in found.text) == (503, True)
    server.start()
    wait_until(lambda: "can&#39;t be seen" not in page.ask("/").text, what="the page to be back")
    assert page.ask("/events").status == 200
