"""Consume, transform and produce in Kafka's own transactions: from topic to topic exactly once, without a database.

    def totals(message):
        order = json.loads(message.value())
        yield Record("totals", message.key(), json.dumps({"total": order["total"]}).encode())

    Transformer(totals, topics=["order-events"], group="totals", kafka={"bootstrap.servers": …}).run()

The records and the positions in the input are committed in one transaction (KIP-98); readers in ``read_committed`` see
both or neither. What was read by a member that has lost its partitions meanwhile is refused by the group's generation,
which goes with the positions (KIP-447), so any number of members may share the work. The order of a key is kept: each
partition is read by one member, in transactions one after the other.

Where a database takes part, this is not enough: its changes are in no transaction of Kafka's. Then write the results
through the outbox; see docs/guides/kafka-to-kafka.md.

| what happens                               | what follows                                                            |
|--------------------------------------------|-------------------------------------------------------------------------|
| killed before the commit                   | the coordinator aborts after transaction_seconds; until then readers    |
|                                            | wait there, and the next owner waits for the positions to be decided    |
| killed during the commit                   | it is decided by the coordinator; the next owner reads what was decided |
| COMMIT times out                           | it is asked for again until its outcome is known; never assumed         |
| … for a minute or transaction_seconds      | a new session, with another producer: this one may have lost its        |
|                                            | coordinator. What that has decided shows in the committed positions     |
| partitions are taken away while it polls   | what was read and not committed is dropped; the next owner reads it     |
| it sleeps past the session or the poll     | the broker refuses its positions, the transaction is aborted, it joins  |
| interval, and wakes in a transaction       | again and reads from what is committed                                  |
| sending the positions never returns        | a new session, with another producer; the coordinator ends the old one's|
|                                            | transaction after transaction_seconds                                   |
| brokers are away                           | it waits; a transaction that was open is aborted, and done again        |
| … until certificates are renewed           | a new session: librdkafka reads them when a client is made              |
| a batch takes longer than                  | the coordinator has aborted the transaction: half as many messages in   |
| transaction_seconds                        | the next one                                                            |
| a record can't be produced: too large,     | the transaction is aborted and ``run`` raises TransformFailed           |
| invalid, no such partition                 |                                                                         |
| a topic does not exist, a right is missing | the transaction is aborted and ``run`` raises KafkaRefused; also where  |
|                                            | librdkafka says only that the producer takes no more records            |
| the transform raises                       | the transaction is aborted and ``run`` raises; or the message goes to   |
|                                            | ``dead_letter_topic``, in the same transaction as its neighbours        |
| the name of a header is not UTF-8          | the same; such names are escaped in the copy                            |
| that copy is too large for its topic       | it goes there without its value, and says so                            |
| records are too large only together, or    | each is a batch of its own on the broker for the next minute            |
| the broker calls one of a batch invalid    |                                                                         |
| a partition without a position has no      | the others are read; where that one begins, its leader says later       |
| leader                                     |                                                                         |
| records of the input are corrupt: wrong    | ``run`` raises KafkaRefused; librdkafka would skip the former, and      |
| checksum, or compression                   | fetch the latter for good                                               |
| Kafka has lost the group's positions       | a run goes on from its own; another one takes what Kafka has            |
| the input was deleted before it was read   | InputLost: it does not jump to where the log begins now                 |
"""

from __future__ import annotations

from outbox.errors import MissingExtra

try:
    from outbox.transform.errors import InputLost, KafkaRefused, TransformFailed
    from outbox.transform.records import DEAD_LETTER, PLACE, Record, Transform
    from outbox.transform.transformer import Transformer
except ModuleNotFoundError as missing:
    if missing.name != "confluent_kafka":
        raise
    raise MissingExtra("kafka", "confluent_kafka") from missing

__all__ = ["DEAD_LETTER", "PLACE", "InputLost", "KafkaRefused", "Record", "Transform", "TransformFailed", "Transformer"]
