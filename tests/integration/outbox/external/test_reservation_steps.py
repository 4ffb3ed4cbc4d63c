"""Old reservations are deleted in steps, each committed of its own, with its line in the audit."""

from __future__ import annotations

import psycopg
import pytest
from external_support import Sink, sink

from outbox._clients import blocks
from outbox.external.reservations import Chosen, ReservationAdmin

__all__ = ["sink"]

BLOCKS = 4
ROWS = 5_000
# Of ten, one each is of another External or group, too young, in conflict, and stuck; five are old.
FILL = f"""
INSERT INTO consumer.reservations
       (grp, name, message_id, topic, part, message_offset, request, state, settled_at, conflict)
SELECT CASE n % 10 WHEN 1 THEN 'others' ELSE 'orders' END, CASE n % 10 WHEN 0 THEN 'refunds' ELSE 'payments' END,
       gen_random_uuid(), 'o', 0, n, '{{}}', CASE n % 10 WHEN 4 THEN 'stuck' ELSE 'confirmed' END,
       CASE n % 10 WHEN 2 THEN now() - interval '6 days' WHEN 4 THEN NULL ELSE now() - interval '9 days' END,
       CASE n % 10 WHEN 3 THEN 'the provider says no' END
  FROM generate_series(0, {ROWS - 1}) AS n"""
OLD = "grp = 'orders' AND name = 'payments' AND message_offset % 10 > 4"
MIDDLE = f"SELECT FROM consumer.reservations WHERE {OLD} AND message_offset = {ROWS // 2 + 5} FOR UPDATE"


@pytest.fixture
def filled(sink: Sink, monkeypatch: pytest.MonkeyPatch) -> Sink:
    monkeypatch.setattr(blocks, "STEP", BLOCKS)
    with sink.connect() as connection:
        connection.execute(FILL)
    return sink


def forget(sink: Sink) -> int:
    with sink.connect() as connection:
        connection.execute("SET lock_timeout = '100ms'")
        return ReservationAdmin(connection, "consumer").forget(Chosen("orders", "payments"), 7)


def offsets(sink: Sink, condition: str) -> list[int]:
    query = f"SELECT message_offset::int FROM consumer.reservations WHERE {condition} ORDER BY 1"
    return [offset for (offset,) in sink.rows(query)]


def noted(sink: Sink) -> list[int]:
    return [count for (count,) in sink.rows("SELECT (details ->> 'count')::int FROM consumer.audit ORDER BY id")]


def steps(sink: Sink, condition: str) -> list[int]:
    """How many rows each step has, of those that have any."""
    step = f"(ctid::text::point)[0]::int / {BLOCKS}"
    query = f"SELECT count(*)::int FROM consumer.reservations WHERE {condition} GROUP BY {step} ORDER BY {step}"
    return [count for (count,) in sink.rows(query)]


def test_each_step_is_committed_with_its_line_of_the_audit(filled: Sink) -> None:
    wanted, kept = steps(filled, OLD), offsets(filled, f"NOT ({OLD})")
    assert len(wanted) > 10
    assert forget(filled) == sum(wanted) == ROWS // 2
    assert noted(filled) == wanted
    assert offsets(filled, "true") == kept
    assert forget(filled) == 0
    assert noted(filled) == wanted


def test_what_an_interruption_leaves_is_done_by_the_next_run(filled: Sink) -> None:
    wanted, kept = steps(filled, OLD), offsets(filled, f"NOT ({OLD})")
    with filled.connect() as other, other.transaction():
        other.execute(MIDDLE)
        with pytest.raises(psycopg.errors.LockNotAvailable):
            forget(filled)
    done = noted(filled)
    assert 2 < len(done) < len(wanted) - 2
    assert done == wanted[: len(done)]
    assert len(offsets(filled, OLD)) == ROWS // 2 - sum(done)
    assert forget(filled) == ROWS // 2 - sum(done)
    assert noted(filled) == wanted
    assert offsets(filled, "true") == kept
