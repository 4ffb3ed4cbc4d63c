"""The job of a run whose consumer is Spark: its effect of a message is a row that says which message it was."""

from __future__ import annotations

import os
from typing import Final

from chaos.payments import ATOMIC, DELIVERY, GROUP, JOB_GROUP, payments
from spark_jobs import ConsumerJob, Dedup, OffsetsOnly

_LOSSY = os.environ.get(DELIVERY) == "at-most-once"
_GROUP: Final = os.environ.get(JOB_GROUP, GROUP)
_EFFECT: Final = f"""
INSERT INTO effects (grp, event_id, topic, part, at)
SELECT '{_GROUP}', message_id, message_topic, message_part, message_offset FROM batch ORDER BY message_offset"""

job = ConsumerJob(
    group=_GROUP,
    topics=["given-by-the-command"],
    effect=f"{_EFFECT}; {payments.reserve()}" if _GROUP == GROUP else _EFFECT,
    atomic="batch" if os.environ.get(ATOMIC) == "batch" else "partition",
    delivery="at-most-once" if _LOSSY else "exactly-once",
    strategy=OffsetsOnly() if _LOSSY else Dedup(),
)
