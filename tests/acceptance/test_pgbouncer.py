"""Writers and relays whose connections to Postgres all go through a PgBouncer in transaction mode."""

from __future__ import annotations

from typing import Any

import psycopg
from pgbouncer import PgBouncer
from support import Crashes, Load, caught_up, check, ends, look_up, wait_until

SERVERS = 4
BATCH = 50


class Pooled(Load):
    """A load whose writers keep no plans on the server: PgBouncer gives them another one for each transaction."""

    def _connect(self) -> psycopg.Connection[Any]:
        return psycopg.connect(self._url, prepare_threshold=None)


def answers(url: str) -> bool:
    try:
        return look_up(url, "SELECT 1") == [(1,)]
    except psycopg.OperationalError:
        return False


def test_all_goes_through_a_pooler_in_transaction_mode(private_postgres, outbox_kafka, outbox_relay, order):
    """A relay is killed, and then Postgres with commits that were never flushed: what it has lost, Kafka must not have.

    The crash comes at any moment of a turn. That rows which vanish between a read and its settling are noticed is for
    tests/integration/relay/settle/test_adoption.py. Exactly-once, without a pooler: test_mutations.py.
    """
    server = private_postgres({"wal_writer_delay": "10s", "synchronous_commit": "off"})
    url = private_postgres.database(server).url
    kind, topic = order
    settings = {"name": outbox_kafka.name("outbox"), "relay__lease_seconds": 20, "relay__batch_size": BATCH}
    crashes = Crashes(url, kind, BATCH)
    with PgBouncer(url, size=SERVERS) as pooler, Pooled(pooler.url, kind, threads=3) as load:
        settings["database_url"] = pooler.url
        relay = outbox_relay(**settings)
        relay.wait_for_log("lanes acquired")
        for victim in ("relay", "Postgres"):
            load.more(200)
            caught_up(url)
            if victim == "relay":
                relay.kill()
                crashes.note()
                relay = outbox_relay(**settings)
                relay.wait_for_log("lanes acquired")
            else:
                # Writers and relay are more than the servers they share, and have no others.
                clients = look_up(
                    url,
                    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
                    "AND backend_type = 'client backend' AND pid <> pg_backend_pid()",
                )
                assert clients <= [(SERVERS,)]
                # A pooler's session can outlive a relay: its lanes are free when their leases end, not before.
                assert look_up(url, "SELECT session FROM outbox.relays WHERE alive_until > now()") == [(None,)]
                assert pooler.servers() <= SERVERS
                server.kill()
                server.start()
                wait_until(lambda: answers(pooler.url), what="the pooler to log in again")
        load.more(100)
        load.drain()
        assert relay.running
        ends(relay)
    messages = outbox_kafka.consume(topic)
    assert check(url, messages) == sum(crashes.repeats(messages))
