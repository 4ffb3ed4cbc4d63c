"""Pauses after failures: doubled up to a limit, however many there were, and random."""

from __future__ import annotations

from outbox._clients.backoff import doubled, jittered


def test_pauses_double_up_to_the_longest():
    assert [doubled(earlier, 0.1, 1.0) for earlier in (-1, 0, 1, 2, 3, 4, 5, 10_000)] == [
        *(0.1, 0.1, 0.2, 0.4, 0.8),
        *(1.0, 1.0, 1.0),
    ]


def test_no_two_clients_return_together():
    pauses = {jittered(2.0) for _ in range(100)}
    assert len(pauses) > 90
    assert all(1.0 <= pause <= 2.0 for pause in pauses)
