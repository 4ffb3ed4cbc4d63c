"""The job of a run whose consumer is Spark: its effect of a message is a row that says which message it was."""

from __future__ import annotations

import os

from chaos.payments import ATOMIC, DELIVERY, GROUP, payments
from spark_jobs import ConsumerJob, Dedup, OffsetsOnly

_LOSSY = os.environ.get(DELIVERY) == "at-most-once"
job = ConsumerJob(
    group=GROUP,
    topics=["given-by-the-command"],
    effect="INSERT INTO effects (event_id, topic, part, at) "
    "SELECT message_id, message_topic, message_part, message_offset FROM batch ORDER BY message_offset; "
    + payments.reserve(),
    atomic="batch" if os.environ.get(ATOMIC) == "batch" else "partition",
    delivery="at-most-once" if _LOSSY else "exactly-once",
    strategy=OffsetsOnly() if _LOSSY else Dedup(),
)
