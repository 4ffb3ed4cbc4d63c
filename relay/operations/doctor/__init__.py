"""``outbox doctor``: explains the chosen delivery, and checks whether Postgres and Kafka are set up for it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from psycopg.conninfo import conninfo_to_dict

from outbox._app.settings import is_loopback
from outbox._clients.checks import Check, Finding, Level, ok, warning
from outbox.consumer.admin import checks as consumers
from outbox.consumer.admin.status import has_tables
from relay.config import Delivery, Settings, SourceKind, delivery_seconds, producer_options
from relay.database import Connector
from relay.insights import OutboxState, look_at_tables
from relay.operations.doctor import kafka, names, postgres
from relay.operations.doctor.run import run
from relay.operations.guarantee import Strategy, guarantee
from relay.parts import build_router
from relay.settle.settlement import lanes_text

EXPLAINED: Final[Mapping[Delivery, str]] = {
    Delivery.AT_MOST_ONCE: "A row is deleted before it is sent, and nothing is sent again: no event is on Kafka twice, "
    "some may be lost (those in flight when a relay, broker or connection fails). Lowest latency. For events that are "
    "worthless when late.",
    Delivery.AT_LEAST_ONCE: "A row is deleted after Kafka acknowledged it: no event is lost; after a crash at most one "
    "batch of each lane is on Kafka twice, under the same event ids. In order per key once repeats are dropped. For "
    "consumers that dedup by event id, such as Spark jobs by default; with OffsetsOnly such a batch is applied twice.",
    Delivery.EXACTLY_ONCE: "A batch and its marker are one Kafka transaction: for a read_committed reader no event is "
    "lost and none is there twice, in order per key, whatever is killed. Costs a few milliseconds per batch. For "
    "consumers without dedup, such as Spark jobs with OffsetsOnly. A replay is a second event to these.",
}


def examine(settings: Settings) -> Iterator[Finding]:
    """Run all checks, and derive from them what is promised; an unreachable server is a finding too.

    Raises ConfigurationError for invalid settings.
    """
    yield ok(f"delivery {settings.delivery}", EXPLAINED[settings.delivery])
    options = producer_options(settings)
    yield ok(
        "times",
        f"a killed relay's lanes are taken over after {settings.relay.lease_seconds:g} s; a batch that Kafka does not "
        f"acknowledge within {delivery_seconds(settings):g} s is dropped and read again",
    )
    known = _Known()
    weakened: dict[str, str] = {}
    for finding in run(_checks(settings, options, known)):
        if finding.setting:
            weakened.setdefault(finding.about, finding.setting)
        yield finding
    yield from _guarantees(settings, known, weakened)


@dataclass
class _Known:
    """What the checks have read, for those that come after them."""

    lanes: dict[SourceKind, list[int]] = field(default_factory=dict)
    groups: Sequence[consumers.DeclaredGroup] = ()
    reached: bool = False
    """Whether the outbox's database answers."""

    def status(self, state: OutboxState) -> Iterator[Finding]:
        for one in state.lanes:
            self.lanes.setdefault(SourceKind(one.source), []).append(one.lane)
        for problem in state.problems():
            yield warning("status", problem, "see `outbox status`")


def _checks(settings: Settings, options: Mapping[str, str], known: _Known) -> Iterator[Check]:
    yield Check("transport", partial(check_transport, settings))
    yield Check("Postgres", partial(_outbox, settings, known))
    yield Check("Postgres of the sink" if settings.relay.sink_url else "consumers", partial(_sink, settings, known))
    lanes = sum(map(len, known.lanes.values()))
    consumed = sorted({topic for group in known.groups for topic in group.topics})
    yield Check(
        "Kafka",
        partial(kafka.checks, settings, options, lanes, consumed),
        run,
        do="check OUTBOX_KAFKA__BOOTSTRAP_SERVERS and the credentials",
    )


def check_transport(settings: Settings) -> Iterator[Finding]:
    """Check whether passwords and events can be read, or a server be impersonated, on the way. Asks no server."""
    protocol = settings.kafka.get("security.protocol", "plaintext").lower()
    servers = map(_host_of, settings.require_kafka().split(","))
    if protocol not in {"ssl", "sasl_ssl"} and not all(map(_is_local, servers)):
        passwords = protocol == "sasl_plaintext"
        yield warning(
            "Kafka, TLS",
            f"security.protocol is {protocol}: {'the credentials and ' if passwords else ''}all events can be read "
            "on the way to the brokers",
            f"set OUTBOX_KAFKA__SECURITY_PROTOCOL={'SASL_SSL' if passwords else 'SSL'}, and "
            "OUTBOX_KAFKA__SSL_CA_LOCATION for an authority of your own",
        )
    yield from _check_postgres_transport("Postgres, TLS", settings.require_database())
    if settings.relay.sink_url is not None:
        yield from _check_postgres_transport("Postgres of the sink, TLS", settings.relay.sink_url)


def _check_postgres_transport(about: str, url: str) -> Iterator[Finding]:
    given = conninfo_to_dict(url)
    hosts = str(given.get("host") or given.get("hostaddr") or "").split(",")
    mode = str(given.get("sslmode") or "prefer")
    if mode not in {"verify-ca", "verify-full"} and not all(map(_is_local, hosts)):
        asked = "is not set, and libpq's default is prefer" if "sslmode" not in given else f"is {mode}"
        yield warning(
            about,
            f"sslmode {asked}: a server that is not verified, or without TLS, gets the password and the events",
            "add ?sslmode=verify-full&sslrootcert=system to the URL, or name your authority's file",
        )


def _host_of(server: str) -> str:
    """Return the host of a broker's address, whose port, and protocol before it, may be missing."""
    host = server.strip().rpartition("://")[2]
    return host.rpartition(":")[0] if re.search(r"(^[^:]*|\]):\d*$", host) else host


def _is_local(host: str) -> bool:
    """Return whether a host is this machine: a socket, localhost, or a loopback address."""
    name = host.strip().strip("[]")
    return not name or name.startswith(("/", "@")) or is_loopback(f"{name}:0")


def _outbox(settings: Settings, known: _Known) -> Iterator[Finding]:
    with Connector(settings.require_database(), "outbox doctor")() as connection:
        known.reached = True
        yield from run(postgres.checks(connection, settings))
        schema = settings.db_schema
        yield from run(names.checks(connection, schema, "schemas"))
        look = partial(look_at_tables, connection, schema)
        yield from run([Check("status", look, known.status, f"SELECT on the tables of {schema}")])


def _sink(settings: Settings, known: _Known) -> Iterator[Finding]:
    """Check the consumers' tables. One failure to connect is enough, where the outbox is in the same database."""
    sink_url = settings.relay.sink_url
    if sink_url is None and not known.reached:
        return
    schema = settings.consumer_schema
    with Connector(sink_url or settings.require_database(), "outbox doctor")() as connection:
        if not has_tables(connection, schema):
            return

        def note_groups() -> Iterator[Finding]:
            known.groups = consumers.declared_groups(connection, schema)
            yield from ()

        yield from run([Check("consumers", note_groups, grant=consumers.GRANT)])
        yield from run(consumers.checks(connection, schema, settings.consumer.keep_days))
        yield from run(names.checks(connection, schema, None if sink_url is None else "schemas of the sink"))


def _guarantees(settings: Settings, known: _Known, weakened: Mapping[str, str]) -> Iterator[Finding]:
    """Yield what is promised on Kafka, by lanes, and in the sink's tables, by groups."""
    weak = "".join(f"; weakened by {about} ({setting})" for about, setting in weakened.items())
    for source, lanes in known.lanes.items() or ((settings.source, ()),):
        promised = guarantee(settings.delivery, source)
        about = "guarantee on Kafka" if len(known.lanes) < 2 else f"guarantee on Kafka, {lanes_text(lanes)}"
        level = Level.WARNING if weak or promised.do else Level.OK
        yield Finding(level, about, promised.found + weak, promised.do)
    router = build_router(settings)
    for group in known.groups:
        about = f"guarantee of group {group.name}"
        if group.topics and not any(map(router.may_write, group.topics)):
            yield ok(about, f"reads {', '.join(group.topics)}, which no relay with these settings writes")
            continue
        strategy = next((each for each in Strategy if each == group.strategy), None)
        if strategy is None:
            found = "not known: no consumer has started for it yet"
            yield ok(about, found, "start the consumer: it records the job's strategy")
            continue
        promised = guarantee(settings.delivery, settings.source, strategy)
        level = Level.WARNING if promised.word != Delivery.EXACTLY_ONCE else Level.OK
        yield Finding(level, about, f"strategy {strategy}, {promised.found}", promised.do)
