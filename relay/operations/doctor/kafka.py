"""The doctor's checks of Kafka: brokers, topics, and transactions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

from confluent_kafka import TopicCollection
from confluent_kafka.admin import AclOperation, ConfigResource  # type: ignore[attr-defined]

from outbox._app.settings import client_options
from outbox._clients.checks import Check, Finding, failure, ok, warning
from outbox._clients.counting import counted
from outbox._clients.kafka_client import Admin
from relay.config import Delivery, Settings, delivery_seconds, state_topic_name
from relay.kafka.open_transactions import OpenTransaction, Whose
from relay.operations.trace import time_of
from relay.parts import build_open_transactions

_SECONDS: Final = 10.0
# A relay's own transactions take milliseconds.
_UNMOVED_SECONDS: Final = 5.0
_DAY_MS: Final = 86_400_000
# No request returns a broker's version. A setting that is new in 4.3 shows whether it is older.
_SINCE_4_3: Final = "cordoned.log.dirs"
_Config = Callable[[str], str]


def checks(settings: Settings, options: Mapping[str, str], lanes: int, consumed: Sequence[str]) -> Iterator[Check]:
    """Return the checks of the brokers, the topics, and the transactions open in them. Raises KafkaException."""
    admin = Admin(client_options(settings))
    with admin.explaining():
        metadata = admin.list_topics(timeout=_SECONDS)

    def configs(kind: Any, *names: str) -> dict[str, Any]:
        with admin.explaining():
            answers = admin.describe_configs([ConfigResource(kind, name) for name in names], request_timeout=_SECONDS)
            return {resource.name: answer.result() for resource, answer in answers.items()}

    def of_topic(name: str) -> _Config:
        entries = configs(ConfigResource.Type.TOPIC, name)[name]
        return lambda entry: str(entries[entry].value)

    yield Check("acknowledgements", partial(_acks, settings))
    yield Check("Kafka", lambda: _copies(len(metadata.brokers), settings.require_kafka()))
    routes = settings.routes or {}
    for aggregate_type, route in sorted(routes.items()):
        name = route.topic
        if name in metadata.topics:
            yield Check(f"topic {name}", partial(_may_write, admin, name))
            yield Check(
                f"topic {name}, settings", partial(of_topic, name), partial(_topic, name, metadata.topics[name])
            )
        else:
            yield Check(f"topic {name}", partial(_missing, name, aggregate_type, settings.create_topics))
    copies = {settings.failures.dead_letter_topic, *(route.dead_letter_topic for route in routes.values())}
    for name in sorted(copy for copy in copies if copy in metadata.topics):
        yield Check(f"topic {name}", partial(_may_write, admin, name))
    for name in consumed:
        if name in metadata.topics:
            yield Check(
                f"topic {name}, ids", partial(of_topic, name), partial(_remembered, name, settings.consumer.keep_days)
            )
    yield Check("open transactions", partial(_open_transactions, settings))
    if settings.delivery is Delivery.EXACTLY_ONCE:
        brokers = partial(configs, ConfigResource.Type.BROKER, *map(str, metadata.brokers))
        yield Check("Kafka's settings", brokers, partial(_brokers, settings, options))
        state = state_topic_name(settings)
        about, found = f"state topic {state}", metadata.topics.get(state)
        if found is None:
            yield Check(about, lambda: [ok(about, "does not exist yet; the relay creates it, compacted")])
        else:
            yield Check(about, partial(of_topic, state), partial(_state_topic, state, found, lanes))
            yield Check(f"topic {state}", partial(_may_write, admin, state))


def _copies(brokers: int, servers: str) -> Iterator[Finding]:
    yield ok("Kafka", f"{brokers} broker{'s' if brokers != 1 else ''} at {servers}")
    if brokers < 3:
        yield warning(
            "Kafka brokers",
            f"{brokers} can't hold 3 copies of an event: losing a disk can lose acknowledged events",
            "run three brokers or more, with min.insync.replicas=2",
            "three brokers",
        )


def _acks(settings: Settings) -> Iterator[Finding]:
    if settings.delivery is Delivery.AT_MOST_ONCE and settings.relay.at_most_once_acks == 0:
        yield warning(
            "acknowledgements",
            "none are asked for (acks=0): the relay takes an event for published once it is sent, and does not see "
            "what Kafka never got or refused",
            "let the database count events (`outbox db ledger on`), and `outbox audit` says how many are lost",
            "relay.at_most_once_acks = 1",
        )


def _missing(name: str, aggregate_type: str, created: bool) -> Iterator[Finding]:
    found = f"does not exist yet ({aggregate_type})"
    do = "create it, or set OUTBOX_CREATE_TOPICS=true; if it is there, grant DESCRIBE on it"
    yield ok(f"topic {name}", found) if created else failure(f"topic {name}", found, do)


def _remembered(name: str, keep_days: int, entry: _Config) -> Iterator[Finding]:
    """Check whether messages can outlive their remembered ids: reading them again makes them dead letters."""
    compacted = entry("cleanup.policy") == "compact"
    ms = -1 if compacted else int(entry("retention.ms"))
    kept = f"messages for {ms / _DAY_MS:g} days" if ms >= 0 else "every message" + " that is its key's last" * compacted
    if not 0 <= ms <= keep_days * _DAY_MS:
        yield warning(
            f"topic {name}, ids",
            f"it keeps {kept}, ids are remembered for {counted(keep_days, 'day')}: older messages become dead letters "
            "if they are read again",
            "raise consumer.keep_days above retention.ms plus the longest outage of a relay, or lower retention.ms",
        )


def _open_transactions(settings: Settings) -> Iterator[Finding]:
    """Find transactions that do not move: read_committed readers see nothing behind them."""
    transactions = build_open_transactions(settings)
    found = transactions.examine(transactions.unmoved(_UNMOVED_SECONDS))
    for each in found:
        yield _open_transaction(each, transactions.limit(each.whose))
    if not found:
        yield ok("open transactions", "none hangs in the outbox's topics")


def _open_transaction(found: OpenTransaction, limit: float) -> Finding:
    # A writer may have made up a time that no calendar has.
    began = None if found.since is None or found.since < 0 else time_of(int(found.since * 1000))
    age = 0.0 if began is None else time.time() - began.timestamp()
    since = "" if began is None else f", since {began.isoformat()}"
    whose = {
        Whose.AN_OUTBOX: " of a relay",
        Whose.ANOTHER: " of another program",
        Whose.UNKNOWN: " (grant READ on the topic to see who began it, and when)",
    }[found.whose]
    topic, partition = found.undecided.partition
    about = f"topic {topic} partition {partition}, transaction"
    text = (
        f"read_committed readers wait at offset {found.undecided.stable}, of {found.undecided.end}, for the end of a "
        f"transaction{whose}{since}; "
    )
    if age >= limit:
        return failure(
            about,
            f"{text}it has exceeded its timeout: a broker has lost its end (KAFKA-20734), or no coordinator answers",
            "run `outbox relay reconcile`: it counts the events in it and their rows, and shows how to end it",
        )
    return warning(
        about,
        f"{text}it did not move within {_UNMOVED_SECONDS:g} s",
        f"check again in {limit - age:.0f} s; if the offset is the same, run `outbox relay reconcile`",
    )


def _may_write(admin: Admin, name: str) -> Iterator[Finding]:
    """Check whether the credentials may write to a topic, as far as the broker reports it."""
    with admin.explaining():
        described = admin.describe_topics(
            TopicCollection([name]), include_authorized_operations=True, request_timeout=_SECONDS
        )[name].result()
    operations = described.authorized_operations
    if operations and AclOperation.WRITE not in operations:
        yield failure(
            f"topic {name}, rights",
            f"these credentials may not write to it, only {', '.join(sorted(each.name for each in operations))}",
            "grant WRITE on the topic to the relay's user",
        )


def _state_topic(state: str, found: Any, lanes: int, config: _Config) -> Iterator[Finding]:
    yield from _topic(state, found, config)
    if len(found.partitions) < lanes:
        yield ok(
            f"state topic {state}",
            f"{counted(len(found.partitions), 'partition')}, {counted(lanes, 'lane')}: the relay adds some",
        )
    for name, wanted in (("cleanup.policy", "compact"), ("unclean.leader.election.enable", "false")):
        value = config(name)
        if value != wanted:
            yield failure(
                f"state topic {state}", f"{name}={value} could lose markers", f"set {name}={wanted}", f"{name}={wanted}"
            )


def _brokers(settings: Settings, options: Mapping[str, str], configs: Mapping[str, Any]) -> Iterator[Finding]:
    """Check whether brokers can lose the end of a transaction (KAFKA-20734), and allow the relay's timeout."""
    newer = sorted(broker for broker, entries in configs.items() if _SINCE_4_3 in entries)
    if newer:
        yield warning(
            "Kafka's version",
            f"broker {', '.join(newer)} is 4.3 or newer (it has the setting {_SINCE_4_3}): 4.3.1 and 4.4.0 can lose "
            "the end of a transaction when a broker restarts (KAFKA-20734), and read_committed readers then hang",
            "run 4.2.1, or a release that fixes KAFKA-20734; if a lane has stopped, run `outbox relay reconcile`",
        )
    else:
        yield ok("Kafka's version", f"older than 4.3 (no broker has the setting {_SINCE_4_3})")
    limit = min(int(entries["transaction.max.timeout.ms"].value) for entries in configs.values())
    asked = int(options["transaction.timeout.ms"])
    if asked > limit:
        yield failure(
            "transaction.timeout.ms",
            f"{asked} is above the broker's transaction.max.timeout.ms of {limit}: no transaction can begin",
            f"{_lower_timeout(settings, limit)}, or raise the broker's limit",
        )


def _lower_timeout(settings: Settings, limit: int) -> str:
    """Return what to lower so that a transaction's timeout fits the broker's limit."""
    if "transaction.timeout.ms" in settings.kafka:
        return "lower kafka.transaction.timeout.ms"
    # The timeout is three times that of a batch, which is two thirds of the lease unless it is given.
    if delivery_seconds(settings) < settings.relay.lease_seconds * 2 / 3:
        return f"it is three times the delivery timeout: set kafka.delivery.timeout.ms to {limit // 3} or less"
    return f"it is twice the lease: set OUTBOX_RELAY__LEASE_SECONDS to {limit // 2000} or less"


def _topic(name: str, topic: Any, config: _Config) -> Iterator[Finding]:
    if not topic.partitions:
        yield warning(f"topic {name}", "it is just being created", "run this again")
        return
    copies = min(len(partition.replicas) for partition in topic.partitions.values())
    required = int(config("min.insync.replicas"))
    text = (
        f"{counted(len(topic.partitions), 'partition')}, {counted(copies, 'replica')}, min.insync.replicas={required}"
    )
    if copies == 1 or required == 1:
        yield warning(
            f"topic {name}",
            f"{text}: an acknowledged event is on one disk only",
            "replication factor 3 and min.insync.replicas=2",
            "replication factor 3" if copies == 1 else "min.insync.replicas=2",
        )
    elif required >= copies:
        yield warning(
            f"topic {name}",
            f"{text}: publishing stops when one broker is down",
            "min.insync.replicas one below the replication factor",
        )
    else:
        yield ok(f"topic {name}", text)
    if config("unclean.leader.election.enable") == "true":
        yield failure(
            f"topic {name}",
            "unclean.leader.election.enable=true: acknowledged events can be lost",
            "set it to false",
            "unclean.leader.election.enable=false",
        )
    policy = config("cleanup.policy")
    if "compact" in policy and not name.endswith(".relay.state"):
        yield warning(
            f"topic {name}",
            f"cleanup.policy={policy}: only the last event of each key is kept",
            "use it for snapshots of state only",
            "cleanup.policy=delete",
        )
