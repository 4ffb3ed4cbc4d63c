"""Compares what was committed, what is on Kafka and what each consumer group has applied, for ``outbox audit``.

Three readers that know nothing of each other's progress:

- tables.py reads the events that were committed, from the outbox's tables and its archive;
- topics.py reads what is on Kafka, with a read_committed client of its own;
- groups.py reads what each consumer group has applied, in the sink.

Events are counted and summed by minute (sums.py). comparison.py compares the sums, and only where they differ the
events one by one. chosen.py says which topics are read, coverage.py what can be compared, and transactions.py which
minutes are over. certificate.py writes the sums to a file, from which anyone can repeat them.

In a comparison one by one, Kafka is read first, then both databases, then what has come to Kafka meanwhile, and what
was deleted. So nothing that is under way is taken for a difference:

| what happens during it                    | why it is no difference                                                  |
|-------------------------------------------|--------------------------------------------------------------------------|
| an event is committed                     | no reader has it, or the outbox has it and it waits                      |
| a scheduled event is due                  | its minute is open: it was scheduled when the audit began                |
| an event is published                     | it waits, or it was archived, and the second reading of Kafka finds it   |
| a row is deleted, and not sent yet        | at-most-once, what is missing is compared again after a lease            |
| it is on Kafka, and not settled yet       | it waits in the outbox                                                   |
| a group applies a message                 | its position has passed it; the second reading of Kafka finds the        |
|                                           | message if the first did not                                             |
| a transaction on Kafka is open            | what is behind it counts as not published yet                            |
| old events are deleted                    | their minutes are expired, or what was committed is not known            |
"""
