"""Who may see the operations page and act on it: over real HTTP, with what attackers and careless people send."""

from __future__ import annotations

import json
import socket
import threading
from typing import Any, Self
from urllib.parse import urlencode

import pytest
import uvicorn
from docs_support import blocks
from page_access import PROXY, audit, environment, failure, serve, through_proxy
from page_support import Answer, PageRun
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Mount
from support import wait_until

from outbox.errors import ConfigurationError
from relay.config import load
from relay.page import Access, Role, User, create_page

__all__ = ["environment", "serve"]


def test_views_of_an_empty_outbox_say_what_would_be_there(serve, environment, monkeypatch):
    monkeypatch.setenv("OUTBOX_NAME", "shop")
    page = serve().sign_in()
    said = {
        "/": "No relay has run here recently",
        "/events": "No waiting events: what was written is published",
        "/dead-letters": "None. An event that Kafka or the relay refuses is retried",
        "/relays": "This outbox has no replication slot",
        "/consumers": "None: no group has asked for one yet",
        "/audit?side=events": "Nothing is compared yet",
        "/audit": "No action yet",
    }
    for path, text in said.items():
        found = page.ask(path).text
        assert text in found, (path, found)
        assert " · outbox shop</title>" in found


def test_only_who_has_the_link_sees_the_page(serve, environment):
    page = serve()
    assert len(page.base) > 20
    for path in ("/", "/events", "/live", "/static/page.js", "/nothing"):
        found = page.ask(path)
        assert (found.status, "open the link" in found.text) == (403, True), path
    assert page.ask("/?token=wrong").status == 403
    assert page.ask("/", headers={"Cookie": "outbox_page=" + "0" * 64}).status == 403
    assert page.ask("/", headers={"Cookie": "outbox_page=ü"}).status == 403
    page.sign_in()
    found = page.ask("/")
    assert found.status == 200
    # The cookie is for the page's path, and below no other one the token is exchanged for it.
    base, page.base = page.base, ""
    for path in ("/", "/events", "/?" + page.link.partition("?")[2]):
        found_elsewhere = page.ask(path)
        assert (found_elsewhere.status, "open the link" in found_elsewhere.text) == (403, True), path
        assert "set-cookie" not in found_elsewhere.headers
    page.base = base
    cookie = page.ask("/?" + page.link.partition("?")[2]).headers
    assert cookie["set-cookie"].startswith("outbox_page=")
    assert all(part in cookie["set-cookie"] for part in ("HttpOnly", "SameSite=strict", f"Path={base}/;"))
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
    assert f'content="0;url={page.base}/"' in page.ask(f"//evil.example/?{token}").text


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
    sent = urlencode(fields).encode()
    for unreadable in (sent + b"&x=\xff", sent + b"&x=%ff", sent + b"&x=" * 5_000):
        found = page.ask(path, body=unreadable, headers={"Origin": ours})
        assert (found.status, "the form can't be read" in found.text) == (400, True), found
    assert audit(environment) == []
    found = page.ask(path, fields)
    assert found.status == 303
    assert "1 event will be retried" in page.ask(found.headers["location"]).text
    (first, second) = audit(environment)
    assert (first[0], first[2]) == ("page: retry dead letters", {"user": "local", "which": event_id, "count": 1})
    # Its key does not wait for it.
    assert (second[0], second[2]) == ("retry", {"event_ids": [event_id], "overtaken": [event_id]})
    assert first[1] == second[1]


def test_behind_a_proxy_only_its_requests_are_answered(serve, environment):
    page = serve(**PROXY, address="0.0.0.0:0")
    assert page.link == "https://outbox.example.com/"
    ann = through_proxy("ann")
    found = page.ask("/", headers=ann)
    assert (found.status, "ann · admin" in found.text) == (200, True)
    for wrong in (
        {"X-Outbox-Proxy-Secret": ""},
        {"X-Outbox-Proxy-Secret": "s3cret"},
        {"X-Outbox-Proxy-Secret": "s3cret-of-the-prüxy"},
        {"X-Forwarded-User": ""},
        {"X-Outbox-Proxy-Secret": "", "Cookie": "outbox_page=" + "0" * 64},
    ):
        assert page.ask("/", headers=ann | wrong).status == 403, wrong
    # There is no token.
    assert page.ask("/?token=", headers=ann | {"X-Outbox-Proxy-Secret": ""}).status == 403
    # Not past the proxy, under the address that it listens at.
    assert page.ask("/", headers=ann | {"Host": page.address}).status == 421
    assert PROXY["proxy_secret"] not in page.ask("/system", headers=ann).text


def test_a_proxy_that_keeps_what_a_client_has_sent_proves_nothing(serve):
    page = serve(**PROXY)
    lines = [f"{name}: {value}" for name, value in through_proxy("ann").items()]

    def status(*sent: str) -> int:
        with socket.create_connection(("127.0.0.1", page.port), 30) as connection:
            connection.sendall("\r\n".join(["GET / HTTP/1.1", *sent, "Connection: close", "", ""]).encode())
            return int(connection.makefile().readline().split()[1])

    assert status(*lines) == 200
    for twice in ("X-Forwarded-User: root", "X-Outbox-Proxy-Secret: guess"):
        assert (status(twice, *lines), status(*lines, twice)) == (403, 403), twice


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


def test_a_users_name_is_utf_8(serve, environment):
    """A name that is not would be that of another user, once its bytes are replaced."""
    page = serve(**PROXY)
    event_id = failure(environment)
    jose = through_proxy("José 😀".encode())
    path = f"/dead-letters/relay/{event_id}"
    found = page.ask(path, headers=jose)
    assert "José 😀 · admin" in found.text
    fields = {"event_id": event_id, "form_token": found.form_token}
    assert page.ask("/dead-letters/relay/retry", fields, jose).status == 303
    assert audit(environment)[0][2]["user"] == "José 😀"
    for name in ("José".encode("latin-1"), b"\xff"):
        found = page.ask(path, headers=through_proxy(name))
        assert (found.status, "X-Forwarded-User, which is not UTF-8" in found.text) == (400, True), found


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
        page.address, page.port, page.base = f"127.0.0.1:{host.port}", host.port, ""
        assert page.ask("/ops/").status == 403
        found = page.ask("/ops/", headers={"X-User": "eve"})
        assert (found.status, "eve · read-only" in found.text) == (200, True)
        assert 'href="/ops/static/page.css"' in found.text
        assert 'data-base="/ops"' in found.text
        for path in ("/topics", "/events", "/dead-letters", "/relays", "/consumers", "/system", "/audit"):
            assert page.ask(f"/ops{path}", headers={"X-User": "eve"}).status == 200, path
        assert page.ask("/ops/static/page.js", headers={"X-User": "eve"}).status == 200
        assert '"/ops/api"' in page.ask("/ops/api/openapi.json", headers={"X-User": "eve"}).text
        assert page.ask("/ops/api/relays/resume", {}, {"X-User": "eve"}).status == 415
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
        page.address, page.port, page.base = f"127.0.0.1:{host.port}", host.port, ""
        assert page.ask("/outbox/").status == 403
        assert "ann · read-only" in page.ask("/outbox/", headers={"X-Forwarded-User": "ann"}).text
