"""The runbooks of `outbox audit --follow`: what causes its alerts, and what ends them. See test_relays.py."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import psycopg
import pytest
from alerting import Samples, collected, firing
from audit_support import Pipeline
from runbook_support import every_step_was_taken, of
from spans import relay
from support import order, wait_until

from relay.insights import look_at_tables
from relay.metrics.outbox import outbox_metrics

__all__ = ["order"]


class Audited(Pipeline):
    """A pipeline with an archive, and the metrics that its relay shows. Its events are of minutes that are over."""

    def follow(self) -> None:
        """Compare what is over: nothing is, while a transaction of the relay is open."""
        wait_until(lambda: self.follower().advance(), 30, "minutes that are over")

    def shown(self) -> Samples:
        with psycopg.connect(self.database.url) as connection:
            state = look_at_tables(connection, "outbox")
        return collected(SimpleNamespace(collect=lambda: outbox_metrics(state, {}, 1)))


@pytest.fixture
def audited(operator, outbox_postgres, outbox_kafka, order) -> Iterator[Audited]:
    operator.settings |= {"relay__archive_days": 1, "name": "outbox"}
    pipeline = Audited(outbox_postgres, outbox_kafka, *order)
    with relay(outbox_postgres, outbox_kafka, relay__archive_days=1):
        pipeline.kept_before()
        yield pipeline


def alerts(audited: Audited, before: Samples | None = None) -> set[str]:
    return {alert for alert in firing(audited.shown(), before) if alert.startswith("OutboxAudit")}


@of("The audit finds differences")
def test_a_record_stands_twice_and_an_event_is_gone(operator, audited):
    ids = audited.sent(5)
    audited.follow()
    assert alerts(audited) == set()
    audited.run("UPDATE outbox.verified SET verified_until = verified_until - interval '30 minutes'")
    audited.repeat(ids[0])
    audited.follow()
    assert alerts(audited) == {"OutboxAuditRepeated"}
    assert f"repeated: event {ids[0]}" in operator.act("outbox audit", status=1)
    assert ids[0] in operator.act("outbox trace EVENT_ID", EVENT_ID=ids[0])
    audited.run(f"UPDATE outbox.published SET event_id = gen_random_uuid() WHERE event_id = '{ids[1]}'")
    audited.run("UPDATE outbox.verified SET verified_until = verified_until - interval '30 minutes'")
    audited.follow()
    assert alerts(audited) >= {"OutboxAuditDifferences"}
    assert f"unknown: event {ids[1]}" in operator.act("outbox audit", status=1)


@of("The audit is behind")
def test_nobody_audits(operator, audited):
    audited.sent(5)
    audited.follow()
    before = audited.shown()
    audited.run("UPDATE outbox.verified SET verified_until = verified_until - interval '2 hours'")
    assert alerts(audited) == {"OutboxAuditBehind"}
    wait_until(lambda: (audited.follower().advance(), alerts(audited) == set())[1], 30, "it to catch up")
    audited.run("UPDATE outbox.verified SET skipped = 2")
    assert alerts(audited, before) == {"OutboxAuditSkips"}


def test_every_step_was_taken(request):
    every_step_was_taken(request)
