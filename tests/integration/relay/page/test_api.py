"""What programs get from the operations page: the same views and actions as JSON, with the same rights and audit."""

from __future__ import annotations

import base64
import json
import re
from typing import Any
from urllib.parse import urlsplit

import jsonschema
import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from page_access import (
    ACTIONS,
    FIELDS,
    PROXY,
    SECRET,
    TEXT,
    audit,
    environment,
    failure,
    failures,
    serve,
    through_proxy,
)
from page_support import Answer, PageRun
from psycopg.types.json import Jsonb
from rows_and_roles import put

from relay.page.page import NAVIGATION

__all__ = ["environment", "serve"]

JSON = {"Content-Type": "application/json"}


def token(page: PageRun) -> dict[str, str]:
    return {"Authorization": f"Bearer {urlsplit(page.link).query.removeprefix('token=')}"}


def get(page: PageRun, path: str) -> Any:
    found = page.ask(f"/api{path}", headers=token(page))
    assert (found.status, found.headers["content-type"]) == (200, "application/json"), (path, found)
    return json.loads(found.text)


def post(page: PageRun, path: str, sent: object, **headers: str) -> Answer:
    return page.ask(f"/api{path}", body=json.dumps(sent).encode(), headers=token(page) | JSON | headers)


@pytest.fixture
def letters(environment) -> str:
    """A dead letter of each side. Returns the id of the event."""
    event_id = failure(environment)
    with psycopg.connect(environment) as connection:
        place = {"grp": "sums", "topic": "orders"}
        put(connection, "consumer.groups", grp="sums", owner="me")
        put(connection, "consumer.offsets", **place, next_offset=1)
        texts = {"message_key": SECRET.encode(), "message_value": b"\xff" + SECRET.encode(), "reason": "undecodable"}
        headers = '[{"key": "h", "value": null}]'
        where = {"message_offset": 7, "message_id": event_id, "message_headers": headers}
        put(connection, "consumer.dead_letters", **place, **where, **texts)
    return event_id


def test_what_is_described_is_served(serve, letters):
    page = serve().sign_in()
    described = get(page, "/openapi.json")
    assert described["servers"] == [{"url": f"{page.base}/api"}]
    values = {"event_id": letters, "group": "sums"}
    views = 0
    for path, operations in described["paths"].items():
        [(method, operation)] = operations.items()
        names = [one["name"] for one in operation["parameters"] if one["in"] == "path"]
        assert names == re.findall(r"\{(\w+)\}", path)
        if method == "get":
            letter = {"id": letters if "/relay/" in path else "1"}
            address = path.format(**values | letter)
            # A browser gets the same.
            assert page.ask(address).headers["content-type"].startswith("text/html"), address
            # As it is described, with nothing else.
            schema = operation["responses"]["200"]["content"]["application/json"]["schema"]
            validator = jsonschema.Draft202012Validator({**schema, "components": described["components"]})
            validator.validate(get(page, address))
            assert not validator.is_valid({}), address
            views += 1
        else:
            assert operation["requestBody"]["content"]["application/json"]["schema"]["properties"]
            assert page.ask(f"/api{path}", headers=token(page)).status in {400, 405}
            assert post(page, path, {}).status == 400, path
    assert {path for _, path, _ in NAVIGATION} <= described["paths"].keys()
    assert {f"/{action}" for action in ACTIONS} <= described["paths"].keys()
    assert views >= 14
    # The other answers of views with several.
    for address in ("/audit?side=consumer", "/audit?side=events", "/events?q=Order/k", "/events?state=dead&days=2"):
        path = address.partition("?")[0]
        schema = described["paths"][path]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
        jsonschema.validate(get(page, address), {**schema, "components": described["components"]})
    assert {"OutboxState", "GroupState", "Found", "Sample"} <= described["components"]["schemas"].keys()
    # Nothing else.
    assert page.ask("/api/nothing", headers=token(page)).status == 404
    assert page.ask("/api/live", headers=token(page)).status == 404
    assert json.loads(page.ask("/api/nothing", headers=token(page)).text) == {"error": "there is no such page"}


def test_what_a_view_says_is_there(serve, letters):
    page = serve()
    overview = get(page, "/?minutes=5")
    assert "no relay is running" in overview["problems"]
    assert overview["overview"]["outbox"]["dead_letters"] == 1
    assert overview["samples"][-1]["backlog"] == 0
    assert get(page, "/relays")["outbox"]["lanes"][0]["held"] is False
    trace = get(page, f"/events/{letters}")
    assert (trace["found"]["event"]["state"], trace["steps"][1]["state"]) == ("dead", "bad")
    assert json.loads(trace["contents"]["payload"]) == {"card": SECRET}
    letter = get(page, "/dead-letters/consumer/1")["letter"]
    assert (letter["offset"], letter["value_encoding"]) == (7, "base64")
    # An id leads to the event, here as there.
    found = page.ask(f"/api/events?q={letters}", headers=token(page))
    assert (found.status, found.headers["location"]) == (303, f"{page.base}/api/events/{letters}")


def test_what_the_audit_has_found_is_shown(serve, environment):
    page, at = serve().sign_in(), "2026-11-25T10:00:00+00:00"
    found = {"kind": "missing", "event_id": None, "topic": "orders", "window": at, "text": "2 of 3", "group": None}
    with psycopg.connect(environment) as connection:
        counts = {"missing": 41, "repeated": 42, "other": 43, "skipped": 44}
        for topic in ("orders", ""):
            connection.execute(
                "INSERT INTO outbox.verified (topic, verified_until, missing, repeated, other, skipped, differences) "
                "VALUES (%s, %s, %s, %s, %s, %s, %s)",
                (topic, at, *counts.values(), Jsonb([found])),
            )
    [topic] = get(page, "/audit?side=events")["topics"]
    assert {name: topic[name] for name in ("topic", *counts)} == {"topic": "orders", **counts}
    text = page.ask("/audit?side=events").text
    assert all(f">{one}<" in text for one in ("orders", *counts.values(), "missing", "2 of 3")), text


def test_only_who_shows_the_token_is_answered(serve, environment):
    page = serve().sign_in()
    once = urlsplit(page.server.link_to_open()).query.removeprefix("token=")
    for wrong in (
        {},
        {"Authorization": "Bearer x"},
        {"Authorization": "Bearer ü"},
        {"Authorization": f"Bearer {once}"},
    ):
        # Nor is the cookie enough.
        found = page.ask("/api/events", headers=wrong)
        assert (found.status, found.headers["www-authenticate"]) == (401, "Bearer"), wrong
    # Outside of the API the token has to be exchanged.
    assert page.ask("/events", headers=token(page) | {"Cookie": ""}).status == 403
    assert page.ask("/api/events", headers=token(page) | {"Host": "evil.example"}).status == 421
    page.base = ""
    assert page.ask("/api/events", headers=token(page)).status == 403


def test_an_action_is_asked_about_done_and_audited(serve, environment):
    page = serve()
    failures(environment, "Order", "too large: #", 3)
    ids = [row["event_id"] for row in get(page, "/dead-letters/relay")["rows"]]
    path, sent = "/dead-letters/relay/discard", {"event_id": ids[:2], "reason": "gone"}
    asked = json.loads(post(page, path, sent).text)
    assert asked["lines"] == ["2 dead letters would be discarded for good", "The reason: gone"]
    assert "done" not in asked
    assert audit(environment) == []
    done = post(page, path, sent | {"confirmed": asked["confirmed"]})
    assert json.loads(done.text) == {"done": "2 events were discarded"}
    assert post(page, path, sent | {"confirmed": asked["confirmed"]}).status == 400
    first = audit(environment)[0]
    assert (first[0], first[2]) == ("page: discard dead letters", {"user": "local", "which": "2 events", "count": 2})
    assert json.loads(post(page, "/dead-letters/relay/retry", {"event_id": ids[2]}).text) == {
        "done": "1 event will be retried"
    }
    # A field that means one thing is given once: the rest would be passed over.
    refused = post(page, "/relays/change", {"scope": "lane", "lanes": [0, 1], "reason": "why"})
    assert (refused.status, json.loads(refused.text)) == (400, {"error": "lanes: give it once"})
    assert post(serve(read_only=True), "/dead-letters/relay/retry", {"event_id": ids[2]}).status == 403


def test_no_other_site_can_act(serve, environment):
    """A proxy's users are known by what their browsers send unasked: it has to be what no other site sends."""
    page = serve(**PROXY)
    event_id = failure(environment)
    ann = through_proxy("ann")
    body = json.dumps({"event_id": event_id}).encode()

    def status(body: bytes = body, method: str = "POST", **headers: str) -> int:
        sent = ann | JSON | {name.replace("_", "-"): value for name, value in headers.items()}
        return page.ask("/api/dead-letters/relay/retry", body=body, headers=sent, method=method).status

    assert status(Content_Type="text/plain") == 415
    assert status(Content_Type="application/x-www-form-urlencoded", body=b"event_id=" + event_id.encode()) == 415
    assert status(Content_Type="") == 415
    for elsewhere in ("http://evil.example", "null", "http://127.0.0.1:1"):
        assert status(Origin=elsewhere) == 403
    assert status(Sec_Fetch_Site="cross-site") == 403
    assert status(Sec_Fetch_Site="same-site") == 403
    asked = page.ask("/api/dead-letters/relay/retry", method="OPTIONS", headers=ann | {"Origin": "http://evil.example"})
    assert asked.status == 405
    assert not [name for name in asked.headers if name.startswith("access-control")]
    assert status(X_Outbox_Proxy_Secret="s3cret") == 403
    assert audit(environment) == []
    assert status(Origin="") == 200
    assert audit(environment)[0][2]["user"] == "ann"


def test_what_is_hidden_is_hidden_here_too(serve, environment, letters, monkeypatch):
    password = "s3cret-of-postgres"
    monkeypatch.setenv("OUTBOX_DATABASE_URL", re.sub(r"//(\w+)@", rf"//\1:{password}@", environment))
    monkeypatch.setenv("OUTBOX_KAFKA__SASL_PASSWORD", SECRET)
    page = serve(payloads="hidden")
    post(page, "/dead-letters/relay/retry", {"event_id": letters})
    letters = failure(environment)
    asked = json.loads(post(page, "/dead-letters/relay/discard", {"event_id": letters, "reason": "why"}).text)
    post(page, "/dead-letters/relay/discard", {"event_id": letters, "reason": "why", "confirmed": asked["confirmed"]})
    letters = failure(environment)
    call = {"grp": "sums", "topic": "orders", "request": Jsonb({"card": SECRET}), "response": Jsonb(SECRET)}
    put(environment, "consumer.reservations", **call)
    values = {"event_id": letters, "group": "sums"}
    for path, operations in get(page, "/openapi.json")["paths"].items():
        if "get" in operations:
            address = path.format(**values, id=letters if "/relay/" in path else "1")
            text = json.dumps(get(page, address))
            assert not [one for one in (SECRET, password, SECRET.encode().hex()) if one in text], address
            assert "payload" not in text.replace("payload_", "") or "/system" in address, address
    assert len(get(page, "/consumers")["calls"][1]) == 1
    assert get(serve(payloads="shown").sign_in(), "/consumers")["calls"][1][0]["request"] == {"card": SECRET}


def test_numbers_of_any_size_and_halves_of_characters_are_shown(serve, environment):
    event_id = failure(environment)
    # Who restores a discarded event has its payload from here. jsonb spells 1e400 out.
    numbers = [str(10**30), "12345678901234567.89", "1.000000000000000001", "12.34", f"1{'0' * 400}", "7" * 5000]
    with psycopg.connect(environment) as connection:
        text = f'{{"n": [{", ".join(numbers)}, 1e-1000]}}'
        connection.execute("UPDATE outbox.dead_letters SET payload = %s", (text,))
    page = serve().sign_in()
    assert "was discarded" in page.act("/dead-letters/relay/discard", event_id=event_id, reason="why").text
    assert ", ".join(numbers[:4]) in page.ask("/audit").text
    answer = page.ask("/api/audit", headers=token(page)).text
    details = json.loads(answer, parse_int=str, parse_float=str)["rows"][0]["details"]
    # One with more zeros than that is a text.
    assert details["payload"]["n"] == [*numbers, "1E-1000"]


def test_the_audit_shows_no_contents_unless_payloads_are_shown(serve, letters, environment):
    encoded = [base64.b64encode(text.encode()).decode() for text in (SECRET, f"{SECRET} in a header")]
    value = base64.b64encode(b"\xff" + SECRET.encode()).decode()
    with psycopg.connect(environment) as connection:
        headers = Jsonb([{"key": "h", "value": encoded[1]}])
        connection.execute("UPDATE consumer.dead_letters SET message_headers = %s", (headers,))
    hidden, shown = serve(payloads="hidden").sign_in(), serve().sign_in()
    assert "was discarded" in hidden.act("/dead-letters/relay/discard", event_id=letters, reason="gone").text
    assert "was discarded" in hidden.act("/dead-letters/consumer/discard", group="sums", reason="gone").text
    for path in ("/audit", "/audit?side=consumer", "/api/audit", "/api/audit?side=consumer"):
        text = hidden.ask(path, headers=token(hidden)).text
        assert letters in text, path
        for secret in (SECRET, value, *encoded):
            assert secret not in text, (path, secret)
    # What else is known of a dead letter is no content.
    [row] = get(hidden, "/audit?side=consumer")["rows"]
    assert (row["details"]["offset"], row["details"]["reason"]) == (7, "undecodable")
    details = get(shown, "/audit?side=consumer")["rows"][0]["details"]
    assert [details["key_base64"], details["value_base64"], details["headers"][0]["value"]] == [
        encoded[0],
        value,
        encoded[1],
    ]


def test_no_body_breaks_it(serve, environment):
    page = serve()
    for body in (
        b"",
        b"[]",
        b"1",
        b"{",
        b'{"a": {}}',
        b'{"a": null}',
        b'{"a": 1.5}',
        b'{"a": [[1]]}',
        b"[" * 100_000,
        b'{"reason": "\\ud800"}',
        b'{"a\\udfff": "b"}',
        b'{"a": ["b", "\\ud800"]}',
    ):
        found = page.ask("/api/relays/change", body=body, headers=token(page) | JSON)
        assert (found.status, "one JSON object" in found.text) == (400, True), body
    assert post(page, "/relays/change", {"scope": "a\0b"}).status == 400
    assert (
        page.ask("/api/relays/change", body=b'{"a": ' + b"1" * 5_000 + b"}", headers=token(page) | JSON).status == 400
    )
    many = json.dumps({"event_id": ["x" * 300_000]}).encode()
    assert page.ask("/api/relays/change", body=many, headers=token(page) | JSON).status == 413

    @settings(max_examples=60, suppress_health_check=list(HealthCheck))
    @given(st.sampled_from(ACTIONS), st.dictionaries(st.sampled_from(FIELDS), TEXT | st.lists(TEXT | st.integers())))
    def act(action: str, fields: dict[str, Any]) -> None:
        found = post(page, f"/{action}", fields)
        assert found.status in {200, 400, 404}, (action, fields, found.text)

    act()
