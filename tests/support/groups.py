"""Which tests run in one process, as they share what is expensive to start."""

from __future__ import annotations

from pathlib import Path

# Files that share a broker; see group.
BROKERS = {
    "mortal": {
        f"acceptance/test_{name}.py"
        for name in (
            "chaos",
            "deployment",
            "kubernetes_processes",
            "network",
            "relays",
            "transform",
            "unusable_topics",
            "wal_failures",
        )
    }
    | {
        "integration/relay/kafka/test_damaged_markers.py",
        "integration/relay/kafka/test_publisher.py",
        "integration/relay/operations/test_doctor_rights.py",
        "integration/relay/settle/test_late_commits.py",
        "integration/spark_jobs/task/test_reader_failures.py",
    },
    "mortal, of consumers": {
        "integration/outbox/consumer/test_assignments.py",
        "integration/outbox/consumer/test_regrown_log.py",
        "integration/outbox/consumer/test_silent_brokers.py",
        "integration/outbox/consumer/test_unknown_offsets.py",
        "integration/outbox/inbox/test_outages.py",
        "integration/outbox/transform/test_doubtful_positions.py",
        "integration/outbox/transform/test_ends.py",
        "integration/outbox/transform/test_final_errors.py",
    },
    "three": {
        "acceptance/test_stuck_topics.py",
        "integration/outbox/test_leaders.py",
        "integration/spark_jobs/driver/test_leaders.py",
    },
    "unverified": {
        "acceptance/runbooks/test_kafka.py",
        "acceptance/runbooks/test_region.py",
        "acceptance/runbooks/test_restores.py",
        "integration/relay/kafka/test_open_transactions.py",
        "integration/relay/operations/test_reconcile.py",
    },
}
KIT = {Path("tests/integration/outbox") / folder for folder in ("sandbox", "testing")}


def group(nodeid: str) -> str:
    """Return which group a test belongs to. One process runs all tests of a group, one after the other.

    spark    the tests of that folder, in two halves: a Spark session is the most expensive thing here, and one process
             with all of them would go on for long after the others.
    secured  what shares a Kafka with TLS.
    mortal, three, unverified   what shares a Kafka that tests may kill, three brokers of which they may, or one that
                                verifies no transactions. Of the first kind there are two.
    planted  what shares a database in which names are planted.
    kit      tests of the test kit and of the wheel, which start and end servers of their own and need no others.
    Each test of JSON at large is a group of its own: they come last, need nothing but a processor, and one process
    would go on with them long after the others had ended. Otherwise, the tests of one file are a group.
    """
    path = Path(nodeid.partition("::")[0])
    if path.name == "test_json_whole.py":
        return nodeid
    if path.parent == Path("tests/spark"):
        return "spark, to op" if path.name < "test_ou" else "spark, from ou"
    for shared in ("secured", "planted"):
        if path.name.startswith(f"test_{shared}_"):
            return shared
    for broker, files in BROKERS.items():
        if path.as_posix().removeprefix("tests/") in files:
            return broker
    if path.name == "test_wheel.py" or path.parent in KIT:
        return "kit"
    return str(path)
