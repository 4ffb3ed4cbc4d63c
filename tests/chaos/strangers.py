"""Other programs that write into the topics of events: what a broker takes and a reader may stumble over.

Each message says in a header what consumer groups are to make of it. What is right of an id, and what of a value, is
decided as the members of the run do it: see member.py. One program writes without transactions; another's transactions
stand open for a while, and are committed or aborted; one is left open when its producer is gone.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from confluent_kafka import KafkaException, Producer
from hostile_messages import MESSAGES, HostileMessage
from raw_kafka import produce
from threads import Threads

from chaos.course import REFUSED_BYTES, Course
from chaos.history import STRANGER
from chaos.stage import Stage

_PAUSE: Final = (0.1, 0.6)
_LONGEST_OPEN: Final = 3.0
_TIMEOUT_SECONDS: Final = 8
"""After which the coordinator aborts a transaction whose producer is gone."""
_ENDS: Final = ("commit", "commit", "commit", "abort", "abort", "leave")
_STEP_SECONDS: Final = 10.0
_MOST: Final = 3


class Strangers(Threads):
    """Writes until ``stop``, in two threads; the messages and their order are those of the course's seed.

    The job of Spark reads no values and is strict, so it gets none that would be dead letters.
    """

    def __init__(self, stage: Stage, course: Course) -> None:
        self._all = course.configuration.consumers == "inbox"
        # Where only the ledger knows what was written, an audit takes records without a source for lost events.
        self._source = {b"ce_source": b"/strangers"} if course.configuration.lossy else {}
        self._topics = stage.topics
        self._small = stage.limited_topics
        self._names = stage.first_topics
        self._transactional_id = stage.topics.name("stranger")
        self._seed = course.seed
        super().__init__(
            {f"stranger-{write.__name__}": partial(self._run, write) for write in (self._loose, self._transactional)}
        )

    def _run(self, write: Any) -> None:
        write(random.Random(f"strangers of {self._seed}, {write.__name__}"))

    def _loose(self, chance: random.Random) -> None:
        for topic, messages in self._drawn(chance):
            number = chance.randrange(8)
            try:
                known = self._topics._admin.list_topics(topic, timeout=_STEP_SECONDS)
                partitions = known.topics[topic].partitions
                partition = partitions[number % len(partitions)]
                leader = known.brokers[partition.leader]
                for each in messages:
                    records = [(each.key, each.value, each.headers)]
                    produce(f"{leader.host}:{leader.port}", topic, partition.id, records, each.milliseconds)
            except (AssertionError, KafkaException, KeyError, OSError):
                # A broker is away, or it is no leader any more. Whether it has the message, the topic will show.
                pass

    def _transactional(self, chance: random.Random) -> None:
        producer: Producer | None = None
        left = 0
        for topic, messages in self._drawn(chance):
            seconds, end = chance.uniform(0, _LONGEST_OPEN), chance.choice(_ENDS)
            try:
                producer = producer or self._producer(left)
                producer.begin_transaction()
                for each in messages:
                    if each.undecodable is None and not any(b"\0" in name for name in each.headers):
                        headers = [(name.decode(), value) for name, value in each.headers.items()]
                        producer.produce(topic, each.value, each.key, headers=headers)
                producer.flush(_STEP_SECONDS)
                self._stop.wait(seconds)
                if end == "commit":
                    producer.commit_transaction(_STEP_SECONDS)
                elif end == "abort":
                    producer.abort_transaction(_STEP_SECONDS)
                else:
                    # Under another id: its successor does not end it.
                    producer, left = None, left + 1
            except KafkaException:
                producer = None

    def _producer(self, number: int) -> Producer:
        producer = Producer(
            {
                "bootstrap.servers": self._topics.bootstrap_servers,
                "transactional.id": f"{self._transactional_id}-{number}",
                "transaction.timeout.ms": _TIMEOUT_SECONDS * 1000,
                "log_level": 0,
            }
        )
        producer.init_transactions(_STEP_SECONDS)
        return producer

    def _drawn(self, chance: random.Random) -> Iterator[tuple[str, Sequence[HostileMessage]]]:
        while not self._stop.wait(chance.uniform(*_PAUSE)):
            topic = chance.choice(self._names)
            drawn = [_marked(chance, each) for each in chance.choices(MESSAGES, k=chance.randint(1, _MOST))]
            drawn = [replace(each, headers={**self._source, **each.headers}) for each in drawn]
            yield topic, [each for each in drawn if self._is_for(topic, each)]

    def _is_for(self, topic: str, message: HostileMessage) -> bool:
        small = len(message.value or b"") < REFUSED_BYTES
        return (small or topic not in self._small) and (self._all or message.headers[STRANGER.encode()] == b"applied")


def _marked(chance: random.Random, message: HostileMessage) -> HostileMessage:
    """Return a message with an id of its own, and with what is to become of it."""
    headers = dict(message.headers)
    if id_ := headers.get(b"ce_id"):
        own = b"%012x" % chance.getrandbits(48)
        headers[b"ce_id"] = (id_[:-12] if len(id_) == 36 else id_) + own
    fit = message.reason is None and message.json
    headers[STRANGER.encode()] = b"applied" if fit else b"dead"
    return replace(message, headers=headers)
