"""docs/explanation/kafka.md shows a log: relays write it here on a real broker, and Kafka's own tool reads it.

Three relays publish to one partition: at-least-once; exactly-once, killed before its second turn is committed; and its
heir.
"""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path

import pytest
from docs_support import blocks
from support import drained

from outbox import Event, Outbox
from outbox.sandbox.kafka import KafkaCluster
from outbox.sandbox.versions import DEFAULT

PAGE = "docs/explanation/kafka.md"
LEFT_OUT = re.compile(
    r" (?:lastOffset|lastSequence|count|partitionLeaderEpoch|deleteHorizonMs|position|CreateTime|size|magic|crc"
    r"|compresscodec|isControl|isvalid|keySize|valueSize|coordinatorEpoch): \S+|(?<=[0-9]) sequence: -?[0-9]+"
    r"| headerKeys: \[.*?\]"
)
"""Fields that the page does not show: sizes, times, and what another one tells."""
STATUS = re.compile(r'"producerId":(\d+),"producerEpoch":(\d+),.*"transactionStatus":(\d)')


def dump(kafka: KafkaCluster, option: str, *patterns: str) -> dict[str, str]:
    """Return what ``kafka-dump-log.sh`` says about each partition that a pattern names. Their broker runs."""
    files = [file for one in patterns for file in sorted(kafka.data_dir.glob(f"broker-*/data/{one}/*.log"))]
    java, class_path, _ = kafka._runtime()
    command = [java, "-cp", class_path, "kafka.tools.DumpLogSegments", option, "--files", ",".join(map(str, files))]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    dumps = (text.partition("\n") for text in re.split("^Dumping ", done.stdout, flags=re.MULTILINE)[1:])
    return {Path(file).parent.name: text for file, _, text in dumps}


def shown(text: str) -> list[str]:
    """Return the lines about batches and records, as the page shows them."""
    lines = [LEFT_OUT.sub("", line) for line in text.splitlines() if line.startswith(("baseOffset", "| offset"))]
    # What differs from run to run, or is the same in each record.
    lines = [re.sub(r'"event_ids":"[^"]+"', '"event_ids":"…"', line) for line in lines]
    return [
        re.sub(r'"version":1,|,"(?:system_identifier|timeline|commit_lsn|writer|outbox)":("[^"]+"|\w+)', "", line)
        for line in lines
    ]


def statuses(kafka: KafkaCluster) -> dict[str, list[str]]:
    """Return the states that the coordinator wrote, by producer id, as the page shows them."""
    found: dict[str, list[str]] = {}
    dumps = dump(kafka, "--transaction-log-decoder", "__transaction_state-*")
    for producer_id, epoch, status in STATUS.findall("".join(dumps.values())):
        line = f"producerEpoch: {epoch} transactionStatus: {status}"
        lines = found.setdefault(producer_id, [])
        # Partitions are added to a transaction together or one after the other.
        if line not in lines[-1:]:
            lines.append(line)
    return found


def test_the_log_that_is_shown_is_what_relays_write(outbox_postgres, outbox_relay, private_kafka):
    kafka = private_kafka()
    if kafka.version != DEFAULT:
        pytest.skip(f"the page shows what Kafka {DEFAULT} writes")
    topics = private_kafka.topics(kafka)
    both = [topics.create_topic("order-events", 1), "outbox.relay.state"]

    def place(*events: tuple[str, str]) -> None:
        with outbox_postgres.connect() as connection:
            for number, kind in events:
                Outbox().add(connection, Event("Order", number, kind, {"total": 4200}))

    def relay(delivery: str, name: str, **env: str):
        settings = {"delivery": delivery, "relay__instance": name, "kafka__linger_ms": 100}
        return outbox_relay(bootstrap_servers=kafka.bootstrap_servers, env=env, **settings)

    first = relay("at-least-once", "a")
    place(("17", "OrderPlaced"), ("18", "OrderPlaced"))
    drained(outbox_postgres.url)
    first.terminate()
    assert first.wait() == 0
    # Its first transaction has the lanes' first markers, the second and the third have events.
    killed = relay("exactly-once", "b", OUTBOX_FAILPOINTS="txn.confirmed=kill@3")
    # Its two producers may overlap; each transaction is awaited, so that the log is the same each time.
    topics.consume("outbox.relay.state", 4)
    place(("17", "OrderPaid"), ("18", "OrderPaid"))
    drained(outbox_postgres.url)
    topics.await_transactions(both)
    place(("17", "OrderShipped"))
    assert killed.wait() == -signal.SIGKILL
    # Under the same name it need not wait for the lease.
    relay("exactly-once", "b")
    drained(outbox_postgres.url)
    topics.await_transactions(both)
    dumps = dump(kafka, "--print-data-log", "order-events-0", "outbox.relay.state-0")
    written = [
        shown(dumps["order-events-0"]),
        [line for line in shown(dumps["outbox.relay.state-0"]) if line.startswith("|")],
        statuses(kafka)["1"],
    ]
    assert [block.text.splitlines() for block in blocks("text") if block.page == PAGE] == written
