"""Who may see the operations page and act on it: over real HTTP, with what attackers and careless people send."""

from __future__ import annotations

import contextlib
import html
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self
from urllib.parse import quote

import psycopg
import pytest
import uvicorn
from docs_support import blocks
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from page_support import Answer, PageRun
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Mount
from support import wait_until

from outbox import Event, Outbox
from outbox.errors import ConfigurationError
from relay.config import load
from relay.page import Access, Role, User, create_page

SECRET = "s3cret-in-a-payload"


@pytest.fixture
def environment(outbox_postgres, outbox_kafka, monkeypatch):
    monkeypatch.setenv("OUTBOX_DATABASE_URL", outbox_postgres.url)
    monkeypatch.setenv("OUTBOX_KAFKA__BOOTSTRAP_SERVERS", outbox_kafka.bootstrap_servers)
    return outbox_postgres.url


@pytest.fixture
def serve(environment) -> Iterator[Any]:
    with contextlib.ExitStack() as stack:

        def start(**web: Any) -> PageRun:
            run = PageRun(**web)
            stack.callback(run.close)
            return run

        yield start


def audit(url: str) -> list[Any]:
    with psycopg.connect(url) as connection:
        return connection.execute("SELECT what, who, details FROM outbox.audit ORDER BY id").fetchall()


def failure(url: str) -> str:
    """Write an event and make it a dead letter, as a relay would. Returns its id."""
    with psycopg.connect(url) as connection:
        event_id = str(Outbox().add(connection, Event("Order", "o1", "T", {"card": SECRET}, headers={"h": SECRET})))
        connection.execute(
            "WITH gone AS (DELETE FROM outbox.events RETURNING *) INSERT INTO outbox.dead_letters (lane, id, event_id, "
            "aggregate_type, aggregate_id, event_type, payload, headers, created_at, attempts, last_error, "
            "first_failed_at) SELECT lane, id, event_id, aggregate_type, aggregate_id, event_type, payload, headers, "
            "created_at, 3, 'refused', now() FROM gone"
        )
    return event_id


def test_only_who_has_the_link_sees_the_page(serve, environment):
    page = serve()
    for path in ("/", "/events", "/live", "/static/page.js", "/nothing"):
        found = page.ask(path)
        assert (found.status, "open the link" in found.text) == (403, True), path
    assert page.ask("/?token=wrong").status == 403
    assert page.ask("/", headers={"Cookie": f"outbox_page_{page.port}=" + "0" * 64}).status == 403
    assert page.ask("/", headers={"Cookie": f"outbox_page_{page.port}=ü"}).status == 403
    page.sign_in()
    found = page.ask("/")
    assert found.status == 200
    cookie = page.ask("/?" + page.link.partition("?")[2]).headers
    assert cookie["set-cookie"].startswith(f"outbox_page_{page.port}=")
    assert all(part in cookie["set-cookie"] for part in ("HttpOnly", "SameSite=strict"))
    headers = found.headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert (headers["x-content-type-options"], headers["cache-control"]) == ("nosniff", "no-store")
    assert headers["x-frame-options"] == "DENY"
    assert "server" not in headers
    # No script, style or handler of its own in a view.
    assert "<script>" not in found.text
    assert "style=" not in found.text
    assert " onclick" not in found.text
    # A refusal has the headers too.
    assert page.ask("/", headers={"Cookie": ""}).headers["x-frame-options"] == "DENY"
    # What is behind a double slash is no other site.
    token = page.link.partition("?")[2]
    assert 'content="0;url=/"' in page.ask(f"//evil.example/?{token}").text


def test_only_the_hosts_that_it_is_known_by_are_answered(serve):
    page = serve().sign_in()
    port = page.address.rpartition(":")[2]
    for host in (f"127.0.0.1:{port}", f"localhost:{port}", f"LOCALHOST:{port}", f"[::1]:{port}"):
        assert page.ask("/events", headers={"Host": host}).status == 200, host
    # A site whose name was made to lead here.
    for host in (f"evil.example:{port}", "127.0.0.1", f"localhost:{port}.evil.example", f"127.0.0.1:{port}@evil", ""):
        assert page.ask("/events", headers={"Host": host}).status in {400, 421}, host


def test_an_action_needs_our_form_from_our_site(serve, environment):
    page = serve().sign_in()
    event_id = failure(environment)
    path, fields = "/dead-letters/relay/retry", {"event_id": event_id, "form_token": page.form_token()}

    def refused(answer: Answer, text: str) -> None:
        assert (answer.status, text in answer.text) == (403, True), answer
        assert audit(environment) == []

    ours = f"http://{page.address}"
    refused(page.ask(path, fields, {"Origin": "http://evil.example"}), "another site")
    refused(page.ask(path, fields, {"Origin": "null"}), "another site")
    refused(page.ask(path, fields, {"Origin": ""}), "another site")
    refused(page.ask(path, fields, {"Origin": ours.replace("http", "https")}), "another site")
    refused(page.ask(path, fields, {"Origin": ours, "Sec-Fetch-Site": "cross-site"}), "another site")
    refused(page.ask(path, fields | {"form_token": "0" * 64}), "expired")
    refused(page.ask(path, {"event_id": event_id}), "expired")
    refused(page.ask(path, fields | {"form_token": "ü"}), "expired")
    refused(page.ask(path, body=json.dumps(fields).encode(), headers={"Origin": ours}), "expired")
    # In the address it is none of the form.
    assert page.ask(f"{path}?form_token={page.form_token()}", {"event_id": event_id}).status == 403
    # A link can't act, and only GET and POST are known.
    assert page.ask(path).status in {400, 404, 405}
    assert page.ask(path, method="DELETE").status == 405
    assert page.ask(path, fields | {"x": "y" * 300_000}).status == 413
    assert audit(environment) == []
    found = page.ask(path, fields)
    assert found.status == 303
    assert "1 events will be tried again" in page.ask(found.headers["location"]).text
    (first, second) = audit(environment)
    assert (first[0], first[2]) == ("page: retry dead letters", {"user": "local", "which": event_id, "count": 1})
    assert (second[0], second[2]) == ("retry", {"event_ids": [event_id]})
    assert first[1] == second[1]


def failures(url: str, kind: str, error: str, count: int) -> None:
    """Write dead letters with an error."""
    with psycopg.connect(url) as connection:
        connection.execute(
            "INSERT INTO outbox.dead_letters (lane, id, event_id, aggregate_type, aggregate_id, event_type, payload, "
            "created_at, attempts, last_error, first_failed_at) SELECT 0, coalesce((SELECT max(id) FROM "
            "outbox.dead_letters), 0) + g, gen_random_uuid(), %s, 'k', 'T', '{}', now(), 1, replace(%s, '#', g::text), "
            "now() FROM generate_series(1, %s) AS g",
            (kind, error, count),
        )


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
    for row in re.findall(r'href="(/dead-letters/relay\?[^"]+)"', page.ask("/dead-letters").text):
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


PROXY = {"proxy_secret": "s3cret-of-the-proxy", "origin": "https://outbox.example.com"}


def through_proxy(user: str, secret: str = PROXY["proxy_secret"]) -> dict[str, str]:
    """Return the headers of a request as a proxy passes it on."""
    return {
        "Host": "outbox.example.com",
        "Origin": PROXY["origin"],
        "X-Outbox-Proxy-Secret": secret,
        "X-Forwarded-User": user,
    }


def test_behind_a_proxy_only_its_requests_are_answered(serve, environment):
    page = serve(**PROXY)
    assert page.link == "https://outbox.example.com/"
    ann = through_proxy("ann")
    found = page.ask("/", headers=ann)
    assert (found.status, "ann · admin" in found.text) == (200, True)
    for wrong in (
        {"X-Outbox-Proxy-Secret": ""},
        {"X-Outbox-Proxy-Secret": "s3cret"},
        {"X-Outbox-Proxy-Secret": "s3cret-of-the-prüxy"},
        {"X-Forwarded-User": ""},
        {"X-Outbox-Proxy-Secret": "", "Cookie": f"outbox_page_{page.port}=" + "0" * 64},
    ):
        assert page.ask("/", headers=ann | wrong).status == 403, wrong
    # There is no token.
    assert page.ask("/?token=", headers=ann | {"X-Outbox-Proxy-Secret": ""}).status == 403
    # Not past the proxy, under the address that it listens at.
    assert page.ask("/", headers=ann | {"Host": page.address}).status == 421
    assert PROXY["proxy_secret"] not in page.ask("/system", headers=ann).text


@pytest.mark.parametrize("twice", ["X-Forwarded-User: root", "X-Outbox-Proxy-Secret: guess"])
def test_a_proxy_that_keeps_what_a_client_has_sent_proves_nothing(serve, twice):
    page = serve(**PROXY)
    lines = [f"{name}: {value}" for name, value in through_proxy("ann").items()]

    def status(*sent: str) -> int:
        with socket.create_connection(("127.0.0.1", page.port), 30) as connection:
            connection.sendall("\r\n".join(["GET / HTTP/1.1", *sent, "Connection: close", "", ""]).encode())
            return int(connection.makefile().readline().split()[1])

    assert (status(*lines), status(twice, *lines), status(*lines, twice)) == (200, 403, 403)


def test_what_a_proxys_user_does_is_audited_under_the_users_name(serve, environment):
    page = serve(**PROXY, user_header="X-Auth-Request-Email")
    event_id = failure(environment)
    ann, bob = (through_proxy("?") | {"X-Auth-Request-Email": name} for name in ("ann@example.com", "bob@example.com"))
    path = f"/dead-letters/relay/{event_id}"
    fields = {"event_id": event_id, "form_token": page.ask(path, headers=bob).form_token}
    # A form of one user is none of another's; and the page has one origin.
    assert page.ask("/dead-letters/relay/retry", fields, ann).status == 403
    assert page.ask("/dead-letters/relay/retry", fields, bob | {"Origin": f"http://{page.address}"}).status == 403
    assert audit(environment) == []
    fields = {"event_id": event_id, "form_token": page.ask(path, headers=ann).form_token, "user": "bob", "who": "bob"}
    assert page.ask("/dead-letters/relay/retry", fields, ann).status == 303
    assert [row[2].get("user") for row in audit(environment)] == ["ann@example.com", None]
    looks = serve(**PROXY, read_only=True)
    assert "ann · read-only" in looks.ask("/", headers=through_proxy("ann")).text


def test_read_only_for_everybody(serve, environment):
    page = serve(read_only=True).sign_in()
    event_id = failure(environment)
    assert "local · read-only" in page.ask("/").text
    fields = {"event_id": event_id, "form_token": page.form_token()}
    assert page.ask("/dead-letters/relay/retry", fields).status == 403
    assert audit(environment) == []


def test_payloads_are_hidden_unless_somebody_wants_them(serve, environment):
    event_id = failure(environment)
    hidden, shown = serve(payloads="hidden").sign_in(), serve().sign_in()
    paths = [f"/events/{event_id}", f"/dead-letters/relay/{event_id}", "/dead-letters", "/dead-letters/relay", "/audit"]
    for path in paths:
        assert SECRET not in hidden.ask(path).text, path
    for path in paths[:2]:
        assert shown.ask(path).text.count(SECRET) == 2, path
    # The audit keeps what was discarded, with its contents.
    fields = {"event_id": event_id, "reason": "gone"}
    assert "1 events were discarded" in hidden.act("/dead-letters/relay/discard", **fields).text
    assert SECRET not in hidden.ask("/audit").text
    assert event_id in hidden.ask("/audit").text
    assert SECRET in shown.ask("/audit").text


def test_what_an_address_needs(environment):
    secret, origin = {"proxy_secret": PROXY["proxy_secret"]}, {"origin": PROXY["origin"]}
    for web, problem in (
        ({"address": "0.0.0.0:8722"}, "must be a loopback address unless web.proxy_secret is set"),
        ({"address": "192.0.2.1:8722"}, "must be a loopback address unless"),
        ({"address": "[::]:8722"}, "must be a loopback address unless"),
        ({"address": "0.0.0.0:8722", **secret}, "needs web.origin too"),
        (secret, "needs web.origin too"),
        (origin, "needs web.proxy_secret too"),
        (secret | {"origin": "http://outbox.example.com"}, "must be https"),
        ({"proxy_secret": "short", **origin}, "16 or more"),
        ({"address": "localhost"}, "must be host:port"),
    ):
        with pytest.raises(ConfigurationError, match=problem):
            load(web=web)
    with pytest.raises(ConfigurationError, match=r"OUTBOX_WEB__ADDRESS=nowhere\.invalid:1"):
        PageRun(**PROXY, address="nowhere.invalid:1")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigurationError, match=r"OUTBOX_WEB__ADDRESS=127\.0\.0\.1:.*in use"):
            PageRun(address=f"127.0.0.1:{taken.getsockname()[1]}")


def test_any_address_with_a_proxy(serve):
    page = serve(**PROXY, address="0.0.0.0:0")
    assert page.ask("/").status == 421
    assert page.ask("/", headers={"Host": "outbox.example.com"}).status == 403
    assert page.ask("/", headers=through_proxy("ann")).status == 200


class Host:
    """Another application that has mounted the page."""

    def __init__(self, app: Starlette, page: Starlette) -> None:
        self.page = page
        self.server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, access_log=False))
        self.thread = threading.Thread(target=self.server.run)

    def __enter__(self) -> Self:
        self.thread.start()
        wait_until(lambda: self.server.started, what="the host to answer")
        self.port = self.server.servers[0].sockets[0].getsockname()[1]
        return self

    def __exit__(self, *_: object) -> None:
        self.page.state.page.close()
        self.server.should_exit = True
        self.thread.join(30)


def test_mounted_in_an_application_that_knows_its_users(environment, serve):
    def authenticate(request: Request) -> User | None:
        name = request.headers.get("x-user")
        return None if name is None else User(name, Role.ADMIN if name == "root" else Role.READ_ONLY)

    mounted = create_page(Access(authenticate=authenticate), load(database_url=environment))
    with Host(Starlette(routes=[Mount("/ops", mounted)]), mounted) as host:
        page = serve()
        page.address, page.port = f"127.0.0.1:{host.port}", host.port
        assert page.ask("/ops/").status == 403
        found = page.ask("/ops/", headers={"X-User": "eve"})
        assert (found.status, "eve · read-only" in found.text) == (200, True)
        assert 'href="/ops/static/page.css"' in found.text
        assert 'data-base="/ops"' in found.text
        for path in ("/topics", "/events", "/dead-letters", "/relays", "/wal", "/consumers", "/system", "/audit"):
            assert page.ask(f"/ops{path}", headers={"X-User": "eve"}).status == 200, path
        assert page.ask("/ops/static/page.js", headers={"X-User": "eve"}).status == 200
        event_id = failure(environment)
        token = page.ask(f"/ops/dead-letters/relay/{event_id}", headers={"X-User": "root"}).form_token
        fields = {"event_id": event_id, "form_token": token}
        found = page.ask("/ops/dead-letters/relay/retry", fields, {"X-User": "root"})
        assert (found.status, found.headers["location"].partition("?")[0]) == (303, "/ops/dead-letters")
        assert audit(environment)[0][2]["user"] == "root"


def test_the_application_of_the_docs(environment, serve):
    (block,) = [block for block in blocks("python") if block.page == "docs/operations/page.md"]
    names: dict[str, Any] = {}
    exec(compile(block.text, block.page, "exec"), names)
    with Host(names["app"], names["page"]) as host:
        page = serve()
        page.address, page.port = f"127.0.0.1:{host.port}", host.port
        assert page.ask("/outbox/").status == 403
        assert "ann · read-only" in page.ask("/outbox/", headers={"X-Forwarded-User": "ann"}).text


def test_new_figures_are_announced_and_end_with_the_page(serve, environment):
    page = serve().sign_in()
    asked = urllib.request.Request(f"http://{page.address}/live", headers={"Cookie": page.cookie})
    with urllib.request.urlopen(asked, timeout=30) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        numbers = []
        while len(numbers) < 3:
            line = answer.readline().decode().strip()
            if line.startswith("id: "):
                numbers.append(int(line[4:]))
        assert numbers == sorted(set(numbers))
        page.server.stop()
        assert answer.read() is not None


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


HOSTILE = ("%00", "\0", "../../etc/passwd", "9" * 30, "-1", "1e9", "2026-13-45", "{{7*7}}", "' OR 1=1 --", "\u202ex")
TEXT = st.text(max_size=40) | st.sampled_from(HOSTILE)
VIEWS = (
    "/",
    "/topics",
    "/events",
    "/dead-letters",
    "/dead-letters/relay",
    "/dead-letters/consumer",
    "/audit",
    "/live/x",
)
PARTS = ("/events/", "/dead-letters/relay/", "/dead-letters/consumer/", "/consumers/groups/", "/static/")
NAMES = ("q", "type", "state", "id", "at", "days", "kind", "lane", "after", "before", "side", "note", "cause", "group")
FIELDS = (
    "scope",
    "lanes",
    "topic",
    "event_id",
    "number",
    "kind",
    "type",
    "state",
    "reason",
    "confirmed",
    "group",
    "name",
    "message_id",
    "cause",
)
ACTIONS = (
    *(f"dead-letters/{side}/{what}" for side in ("relay", "consumer") for what in ("retry", "discard")),
    *("consumers/calls/retry", "consumers/calls/cancel", "relays/change", "relays/resume"),
)


def test_no_address_breaks_it(serve):
    page = serve().sign_in()

    @settings(max_examples=250, suppress_health_check=list(HealthCheck))
    @given(st.sampled_from([*VIEWS, *PARTS]), TEXT, st.dictionaries(st.sampled_from(NAMES), TEXT, max_size=4))
    def look(path: str, text: str, query: dict[str, str]) -> None:
        address = path + quote(text, safe="") if path in PARTS else path
        asked = "&".join(f"{name}={quote(value, safe='')}" for name, value in query.items())
        found = page.ask(f"{address}?{asked}")
        # 503 is Postgres' or Kafka's, and both are there.
        assert found.status in {200, 303, 400, 403, 404}, (address, asked, found.text)

    look()
    # What somebody asks for is text in the answer.
    found = page.ask("/events?q=" + quote("{{7*7}}/<script>alert(1)</script>"))
    assert "{{7*7}}/&lt;script&gt;" in found.text


def test_no_form_breaks_it(serve, environment):
    page = serve().sign_in()
    token = page.form_token()

    @settings(max_examples=200, suppress_health_check=list(HealthCheck))
    @given(st.sampled_from(ACTIONS), st.dictionaries(st.sampled_from(FIELDS), TEXT, max_size=5))
    def act(action: str, fields: dict[str, str]) -> None:
        encoded = {name: value.encode("utf-8", "surrogatepass") for name, value in fields.items()}
        found = page.ask(f"/{action}", encoded | {"form_token": token})
        assert found.status in {200, 303, 400, 404}, (action, fields, found.text)

    act()


def test_the_command_serves_until_it_is_told_to_end(environment):
    process = subprocess.Popen(
        [sys.executable, "-m", "relay.cli", "web", "--address", "127.0.0.1:0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        link = line.removeprefix("the page is at ").strip()
        assert "?token=" in link
        # A live connection does not keep it from ending.
        opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        address = link.partition("/?")[0]
        opener.open(link, timeout=60).close()
        with opener.open(f"{address}/", timeout=60) as answer:
            assert "Overview" in answer.read().decode()
        with opener.open(f"{address}/live", timeout=60) as live:
            live.readline()
            began = time.monotonic()
            process.send_signal(signal.SIGTERM)
            _, err = process.communicate(timeout=60)
        assert time.monotonic() - began < 30
        assert "Traceback" not in err, err
        # Whoever reads the log has no key to the page.
        assert link.partition("token=")[2] not in err
    finally:
        process.kill()
        process.communicate()
    assert process.returncode in {0, -signal.SIGTERM}
