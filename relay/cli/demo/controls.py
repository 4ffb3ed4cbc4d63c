"""What someone who watches the demo can do to it: kill processes, stop the broker, repeat a delivery.

The methods of ``Controls`` may be called from any thread, at any time. Each returns a short text of what it did. What
goes down comes back: the demo's loop calls ``tend``.

| action          | what follows                                                                                |
|-----------------|---------------------------------------------------------------------------------------------|
| kill a process  | started again after RESTART_SECONDS                                                         |
| stop the broker | started again after AWAY_SECONDS, if not by hand before; a process that ends with an error  |
|                 | while it is away, or within FORGIVE_SECONDS of its return, is started again too             |
| repeat          | a message of the topic stands there twice; the consumer drops the second by its event id    |
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from relay.cli.demo.processes import Child, State
from relay.cli.demo.services import PARTITIONS, Broker

if TYPE_CHECKING:
    from confluent_kafka import Message

AWAY_SECONDS: Final = 8.0
FORGIVE_SECONDS: Final = 30.0
_TIMEOUT: Final = 10.0

_OVER: Final = "the demo is over"
_FOREIGN: Final = "this Kafka is not the demo's own, so it is not stopped: only a sandbox's is"

BrokerState = Literal["running", "stopping", "stopped", "starting"]


@dataclass(frozen=True, slots=True)
class Standing:
    """What a process does now, and how often it was killed (the broker: stopped)."""

    state: State | BrokerState
    times: int
    how: Literal["killed", "stopped"] = "killed"

    def __str__(self) -> str:
        return f"{self.state}, {self.how} {self.times}×" if self.times else self.state


class Controls:
    """Acts on a running demo.

    shop, relay, consumer   its processes.
    broker                  None if Kafka is not the demo's to stop.
    kafka, topic            where the events are.
    say                     called with what was done.
    """

    def __init__(
        self,
        shop: Child,
        relay: Child,
        consumer: Child,
        broker: Broker | None,
        kafka: Mapping[str, str],
        topic: str,
        say: Callable[[str], None],
    ) -> None:
        self._shop = shop
        self._relay = relay
        self._consumer = consumer
        self._broker = broker
        self._broker_state: BrokerState = "running"
        self._broker_stops = 0
        self._changed_at: float | None = None
        self._broker_lock = threading.Lock()
        self._kafka = {**kafka, "log_level": "0"}
        self._topic = topic
        self._say = say
        self._background = ThreadPoolExecutor(max_workers=1, thread_name_prefix="demo-broker")
        self._starting: Future[str] | None = None
        self._over = False

    def kill_relay(self) -> str:
        """Kill the relay by SIGKILL."""
        return self._crash(self._relay)

    def kill_consumer(self) -> str:
        """Kill the consumer, which is Spark's driver, by SIGKILL."""
        return self._crash(self._consumer)

    def stop_broker(self) -> str:
        """Stop Kafka. Returns when it has stopped."""
        if self._broker is None:
            return self._told(_FOREIGN)
        with self._broker_lock:
            if self._over:
                return self._told(_OVER)
            if self._broker_state != "running":
                return self._told("the broker is down already")
            self._broker_state = "stopping"
            self._broker_stops += 1
            try:
                self._broker.stop()
            finally:
                # Even if that failed: it is started again then.
                self._changed_at = time.monotonic()
                self._broker_state = "stopped"
            return self._told(f"the broker is stopped; it starts again in {AWAY_SECONDS:.0f} s")

    def start_broker(self) -> str:
        """Start Kafka. Returns when it answers."""
        if self._broker is None:
            return self._told(_FOREIGN)
        with self._broker_lock:
            if self._broker_state == "running":
                return self._told("the broker runs")
            self._broker_state = "starting"
            try:
                self._broker.start()
            except BaseException:
                self._broker_state = "stopped"
                raise
            self._changed_at = time.monotonic()
            self._broker_state = "running"
            return self._told("the broker runs again")

    def repeat_delivery(self) -> str:
        """Publish a message of the topic once more: the same key, headers and value, in the same partition."""
        if self._over:
            return self._told(_OVER)
        if not self.broker_runs:
            return self._told("the broker is down: there is nothing to repeat")
        from confluent_kafka import KafkaException

        try:
            message = self._any_message()
            if message is None:
                return self._told("no event has been published yet: there is nothing to repeat")
            offset = self._publish_again(message)
        except KafkaException as error:
            return self._told(f"Kafka did not answer, so nothing is repeated: {error}")
        return self._told(f"partition {message.partition()}: offset {message.offset()} again, at offset {offset}")

    def states(self) -> dict[str, Standing]:
        """Return what each process does."""
        children = {child.name: Standing(child.state, child.kills) for child in self._children}
        return {**children, "broker": Standing(self._broker_state, self._broker_stops, "stopped")}

    @property
    def broker_runs(self) -> bool:
        """Return whether Kafka is there."""
        return self._broker_state == "running"

    @property
    def at_rest(self) -> bool:
        """Return whether everything that was killed or stopped is back."""
        return self.broker_runs and all(child.state == "running" for child in (self._relay, self._consumer))

    def tend(self) -> None:
        """Start what has been away for long enough. Raises DemoFailed if a process failed by itself."""
        for child in self._children:
            if said := child.tend(forgive=self._forgiving):
                self._say(said)
        if self._starting is not None and self._starting.done():
            self._starting.result()
            self._starting = None
        if self._starting is None and self._broker_state == "stopped" and self._seconds_since_change >= AWAY_SECONDS:
            self._starting = self._background.submit(self.start_broker)

    def close(self) -> None:
        """Start Kafka if it is stopped: whoever comes next needs it. From now on it is left alone."""
        with self._broker_lock:
            self._over = True
        self._background.shutdown()
        if not self.broker_runs:
            self.start_broker()

    @property
    def _children(self) -> tuple[Child, Child, Child]:
        return self._shop, self._relay, self._consumer

    @property
    def _seconds_since_change(self) -> float:
        return float("inf") if self._changed_at is None else time.monotonic() - self._changed_at

    @property
    def _forgiving(self) -> bool:
        return not self.broker_runs or self._seconds_since_change < FORGIVE_SECONDS

    def _crash(self, child: Child) -> str:
        if child.crash():
            return self._told(f"kill -9 {child.name}")
        return self._told(f"{child.name} does not run")

    def _told(self, text: str) -> str:
        self._say(text)
        return text

    def _any_message(self) -> Message | None:
        """Return a message of the topic, from one of its partitions; None if there is none."""
        from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition

        consumer = Consumer(
            {
                **self._kafka,
                "group.id": f"{self._topic}-controls",
                "enable.auto.commit": False,
                "enable.partition.eof": True,
                "isolation.level": "read_committed",
            }
        )
        try:
            for number in range(PARTITIONS):
                low, high = consumer.get_watermark_offsets(TopicPartition(self._topic, number), timeout=_TIMEOUT)
                if high == low:
                    continue
                # The last offsets may be a transaction's marker, which is no message: then the first message is taken.
                for offset in (low + secrets.randbelow(high - low), OFFSET_BEGINNING):
                    consumer.assign([TopicPartition(self._topic, number, offset)])
                    message = consumer.poll(_TIMEOUT)
                    if message is not None and message.error() is None:
                        return message
            return None
        finally:
            consumer.close()

    def _publish_again(self, message: Message) -> int:
        """Publish a copy. Returns its offset. Raises KafkaException if Kafka does not take it."""
        from confluent_kafka import KafkaException, Producer

        told: list[Message] = []
        failed: list[KafkaException] = []

        def delivered(error: object, copy: Message) -> None:
            if error is None:
                told.append(copy)
            else:
                failed.append(KafkaException(error))

        producer = Producer({**self._kafka, "acks": "all", "enable.idempotence": True, "message.timeout.ms": 10_000})
        partition = message.partition()
        assert partition is not None
        producer.produce(
            self._topic,
            message.value(),
            message.key(),
            partition,
            on_delivery=delivered,
            headers=message.headers(),
        )
        producer.flush()
        if failed:
            raise failed[0]
        offset = told[0].offset()
        assert offset is not None
        return offset
