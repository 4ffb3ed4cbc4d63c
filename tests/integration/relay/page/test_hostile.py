"""Whatever address or form is sent to the operations page: an answer, and never a traceback."""

from __future__ import annotations

from urllib.parse import quote

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from page_access import ACTIONS, FIELDS, TEXT, environment, serve

__all__ = ["environment", "serve"]


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


def test_no_address_breaks_it(serve):
    page = serve().sign_in()

    @settings(max_examples=50, suppress_health_check=list(HealthCheck))
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

    @settings(max_examples=50, suppress_health_check=list(HealthCheck))
    @given(st.sampled_from(ACTIONS), st.dictionaries(st.sampled_from(FIELDS), TEXT, max_size=5))
    def act(action: str, fields: dict[str, str]) -> None:
        encoded = {name: value.encode("utf-8", "surrogatepass") for name, value in fields.items()}
        found = page.ask(f"/{action}", encoded | {"form_token": token})
        assert found.status in {200, 303, 400, 404}, (action, fields, found.text)

    act()
