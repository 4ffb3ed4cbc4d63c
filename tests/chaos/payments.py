"""The effects of a run outside the database: one call of a payment provider for each message of some topics."""

from __future__ import annotations

import os
import random
import sqlite3
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from provider import Provider

from outbox.external import External, HttpCall

GROUP: Final = "effects"
SPARK_GROUP: Final = "spark"
"""Spark's job has a group of its own where the inbox applies too. The calls are of what the first one applies."""
PROVIDER, TOPICS, ATOMIC, DELIVERY = "CHAOS_PROVIDER", "CHAOS_PAID_TOPICS", "CHAOS_ATOMIC", "CHAOS_DELIVERY"
JOB_GROUP: Final = "CHAOS_JOB_GROUP"
"""Environment variables: the provider's address, the topics with a comma between them, and what Spark's job applies
in one transaction, by which delivery and as which group."""
TABLE: Final = """
CREATE TABLE settled (number bigint GENERATED ALWAYS AS IDENTITY, event_id uuid, topic text, part integer, at bigint,
                      outcome text)"""
_SETTLED: Final = """
INSERT INTO settled (event_id, topic, part, at, outcome)
VALUES (%(message_id)s, %(request)s ->> 'topic', (%(request)s ->> 'part')::integer, (%(request)s ->> 'at')::bigint,"""
_PLACE: Final = "'topic', message_topic, 'part', message_part, 'at', message_offset"

_URL: Final = os.environ.get(PROVIDER, "http://127.0.0.1:1")
payments = External(
    name="payments",
    group=GROUP,
    request=f"jsonb_build_object('order', message_id, {_PLACE})",
    where=f"message_topic = ANY(string_to_array('{os.environ.get(TOPICS, '')}', ','))",
    call=HttpCall(f"{_URL}/charges"),
    cancel=HttpCall(f"{_URL}/cancel", lambda call: {"key": call.call_key, "order": call.request["order"]}),
    on_confirmed=f"{_SETTLED} 'confirmed')",
    on_cancelled=f"{_SETTLED} 'cancelled')",
    # Callers are killed and halted: what they had in hand is another's after a lease.
    timeout=2.0,
    lease=4.0,
    first_wait=0.05,
    longest_wait=0.5,
    max_attempts=1000,
)


class ChaosProvider(Provider):
    """Refuses some orders for good, and loses requests and answers of others. Its book is in memory."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._memory = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        # It is read behind the end of the server.
        weakref.finalize(self, self._memory.close)
        self._asked: Counter[str] = Counter()
        super().__init__(Path())

    def next_order(self, name: str) -> str:
        """Return what to do with a request, by the order's name and how often it came before."""
        with self._lock:
            self._asked[name] += 1
            first = self._asked[name] == 1
        chance = random.Random(f"{self._seed} {name}")
        kind = chance.random()
        if name.startswith("cancel "):
            return chance.choice(("ok", "drop", "done-drop", "503:0")) if first else "ok"
        if kind < 0.05:
            return chance.choice(("refuse", "done-drop")) if first else "refuse"
        if kind < 0.2 and first:
            return chance.choice(("drop", "done-drop", "done-500", "done-half", "503:0", "429:0"))
        return "ok"

    @contextmanager
    def _book(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            yield self._memory
