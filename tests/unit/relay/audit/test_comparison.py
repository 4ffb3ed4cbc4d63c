"""When what an audit has found is compared again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from relay.audit import comparison, follow
from relay.audit.findings import Audit, Difference, Scope
from relay.audit.sums import Window, minute_start
from relay.config import load

SCOPE = Scope(minute_start(100), minute_start(110))
SETTINGS = {"database_url": "postgresql://u@127.0.0.1:1/shop", "kafka": {"bootstrap.servers": "127.0.0.1:1"}}


@pytest.mark.parametrize(
    ("delivery", "kind", "again"),
    [
        ("at-most-once", "missing", True),
        ("at-most-once", "unknown", False),
        ("at-least-once", "missing", False),
        ("at-most-once", None, False),
    ],
)
def test_what_may_be_between_the_outbox_and_kafka_is_compared_again_after_a_lease(monkeypatch, delivery, kind, again):
    """At-most-once, rows are deleted before they are sent."""
    made, slept = [], []

    class Made:
        skipped_topics = ()

        def __init__(self, *_: Any) -> None:
            made.append(self)
            self.ledger_differences = {} if kind is None else {Window("orders", 100): kind}

        def run(self) -> Any:
            return self

    monkeypatch.setattr(comparison, "_Comparison", Made)
    monkeypatch.setattr(comparison, "time", SimpleNamespace(sleep=slept.append))
    settings = load(**SETTINGS, delivery=delivery, relay={"lease_seconds": 7.0})
    found: Any = comparison.audit(settings, SCOPE, SimpleNamespace())
    assert (len(made), slept, found is made[-1]) == ((2, [7.0], True) if again else (1, [], True))


@pytest.mark.parametrize(
    ("event_id", "group", "again"), [(None, None, True), (None, "sums", False), ("an id", None, False)]
)
def test_what_the_ledger_counts_otherwise_for_a_topic_that_is_behind_is_compared_with_all(
    monkeypatch, event_id, group, again
):
    """Its types may go to another topic since."""
    scopes: list[Scope] = []

    def audit(_settings: Any, scope: Scope, _opened: Any) -> Audit:
        scopes.append(scope)
        found = Audit(scope.since, scope.until, b"key")
        found.add(Window("orders", 100), Difference("unknown", event_id, "orders", scope.since, "", group))
        return found

    monkeypatch.setattr(follow, "audit", audit)
    follower: Any = follow.Follower(load(**SETTINGS), SCOPE)
    follower._audit(None, 100, 110, "orders")
    assert [(scope.topics, scope.more) for scope in scopes] == [(["orders"], ()), (None, ["orders"])][: 1 + again]
