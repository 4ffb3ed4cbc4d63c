"""Two outboxes on one Prometheus: what goes wrong in one is an alert of that one, whatever the other one shows.

promtool evaluates the real rules; what relays and consumers really show is in test_alerts.py and the runbooks' tests.
"""

from __future__ import annotations

import re
from collections import defaultdict

from alerting import RULES, Samples, firing_by_outbox

from relay.core.pauses import ScopeKind

NOW = 600.0

RELAY: Samples = {
    "outbox_relay_ready": 1,
    "outbox_relay_topics_unusable": 0,
    "outbox_relay_topics_grown": 0,
    "outbox_relay_partitions_hanging": 0,
    'outbox_relay_events_total{result="lost"}': 0,
    'outbox_relay_upkeep_wait_seconds{task="archive"}': 0,
    "outbox_slot_healthy": 1,
    "outbox_slot_retained_wal_over_limit": 0,
    "outbox_slot_safe_wal_bytes": 1e9,
    "outbox_slot_retained_wal_bytes": 1e7,
    "outbox_slot_repairs_total": 0,
    "outbox_relay_lanes_lost_total": 0,
}
STATE: Samples = {
    "outbox_backlog_events": 20_000,
    "outbox_backlog_oldest_age_seconds": 5,
    'outbox_backlog_topic_oldest_age_seconds{topic="orders"}': 5,
    'outbox_backlog_topic_oldest_age_seconds{topic="bills"}': 5,
    "outbox_events_retrying": 0,
    "outbox_dead_letters": 0,
    "outbox_dead_letters_blocking": 0,
    "outbox_lanes_unheld": 0,
    "outbox_relays_alive": 2,
    "outbox_relays_expected": 2,
    "outbox_scheduled_overdue_seconds": 0,
    'outbox_table_dead_rows{schema="outbox",table="events"}': 1_000,
    'outbox_table_rows{schema="outbox",table="published_default"}': 0,
    'outbox_table_rows{schema="consumer",table="processed_messages_default"}': 1_000,
    'outbox_table_prune_overdue_seconds{schema="outbox",table="published"}': 0,
    'outbox_table_prune_overdue_seconds{schema="consumer",table="processed_messages"}': 90_000,
    "outbox_database_bytes": 20e9,
    "outbox_wal_kept_bytes": 1e7,
    'outbox_audit_verified_until_timestamp_seconds{topic="orders"}': NOW,
    **{
        f'outbox_audit_{name}_total{{topic="orders"}}': 0.0
        for name in ("missing", "repeated", "other_differences", "skipped_minutes")
    },
    **{f'outbox_pauses{{scope="{kind}"}}': 0.0 for kind in ScopeKind},
}
# Groups of two outboxes may have the same name: each has a sink of its own.
OF_PARTITION = '{group="g",topic="t",partition="0"}'
CONSUMER: Samples = {
    'outbox_consumer_postgres_up{group="g"}': 1,
    'outbox_consumer_kafka_up{group="g"}': 1,
    'outbox_consumer_generation{group="g"}': 1,
    'outbox_consumer_last_round_timestamp_seconds{group="g"}': NOW,
    f"outbox_consumer_last_progress_timestamp_seconds{OF_PARTITION}": NOW,
    f"outbox_consumer_lag_messages{OF_PARTITION}": 5,
    f"outbox_consumer_log_end_offset{OF_PARTITION}": 100,
    f"outbox_consumer_uncommitted_messages{OF_PARTITION}": 0,
    f"outbox_consumer_dead_letters_waiting{OF_PARTITION}": 0,
    f"outbox_consumer_reservations_stuck{OF_PARTITION}": 0,
    f"outbox_consumer_reservations_overdue_seconds{OF_PARTITION}": 60,
}
# The relay sees these whether their consumers run or not.
OF_INBOX = '{group="inbox",topic="t",partition="0"}'
GROUPS: Samples = {
    series: value
    for group in ("g", "inbox")
    for series, value in {
        f'outbox_group_lag_messages{{group="{group}",topic="t"}}': 5,
        f'outbox_group_wait_seconds{{group="{group}",topic="t",partition="0"}}': 5,
        f'outbox_group_last_progress_timestamp_seconds{{group="{group}"}}': NOW,
        f'outbox_group_dead_letters{{group="{group}"}}': 0,
        f'outbox_group_calls_stuck{{group="{group}"}}': 0,
        f'outbox_group_calls_overdue_seconds{{group="{group}"}}': 60,
        f'outbox_group_losses{{group="{group}"}}': 0,
    }.items()
}
HEALTHY: Samples = RELAY | STATE | GROUPS | CONSUMER

# What the ill outbox shows instead, now and six minutes before; None: it is not shown.
Shown = dict[str, float | None]
NO_RELAY: Shown = dict.fromkeys([*RELAY, *STATE, *GROUPS])
FAILURES: dict[str, tuple[Shown, Shown]] = {
    "OutboxNotPublishing": (NO_RELAY, {}),
    "OutboxBacklogOld": ({'outbox_backlog_topic_oldest_age_seconds{topic="orders"}': 100}, {}),
    "OutboxBacklogUnknown": ({"outbox_backlog_oldest_age_seconds": None}, {}),
    "OutboxBacklogGrows": ({}, {"outbox_backlog_events": 11_000}),
    "OutboxPaused": ({'outbox_pauses{scope="lane"}': 1}, {}),
    "OutboxLaneUnheld": ({"outbox_lanes_unheld": 1}, {}),
    "OutboxRelayNotReady": ({"outbox_relay_ready": 0}, {}),
    "OutboxTopicUnusable": ({"outbox_relay_topics_unusable": 1}, {}),
    "OutboxTopicGrown": ({"outbox_relay_topics_grown": 1}, {}),
    "OutboxKeyBlocked": ({"outbox_dead_letters_blocking": 1}, {}),
    "OutboxDeadLetters": ({"outbox_dead_letters": 1}, {}),
    "OutboxEventsLost": ({'outbox_relay_events_total{result="lost"}': 7}, {}),
    "OutboxTransactionHangs": ({"outbox_relay_partitions_hanging": 1}, {}),
    "OutboxUpkeepFails": ({'outbox_relay_upkeep_wait_seconds{task="archive"}': 700}, {}),
    "OutboxSlotUnhealthy": ({"outbox_slot_healthy": 0}, {}),
    "OutboxSlotRetainsWal": ({"outbox_slot_retained_wal_over_limit": 1}, {}),
    "OutboxRelaysMissing": ({"outbox_relays_alive": 1}, {}),
    "OutboxLanesLost": ({"outbox_relay_lanes_lost_total": 3}, {}),
    "OutboxScheduledOverdue": ({"outbox_scheduled_overdue_seconds": 400}, {}),
    "OutboxSlotRunsOut": ({"outbox_slot_safe_wal_bytes": 1e8, "outbox_slot_retained_wal_bytes": 9e8}, {}),
    "OutboxSlotRepaired": ({"outbox_slot_repairs_total": 1}, {}),
    "OutboxDeadRows": ({'outbox_table_dead_rows{schema="outbox",table="events"}': 2e6}, {}),
    "OutboxPartitionsMissing": ({'outbox_table_rows{schema="outbox",table="published_default"}': 3}, {}),
    "OutboxPruneOverdue": ({'outbox_table_prune_overdue_seconds{schema="outbox",table="published"}': 90_000}, {}),
    "OutboxDiskFills": ({"outbox_database_bytes": 40e9}, {}),
    "OutboxAuditMissing": ({'outbox_audit_missing_total{topic="orders"}': 1}, {}),
    "OutboxAuditRepeated": ({'outbox_audit_repeated_total{topic="orders"}': 1}, {}),
    "OutboxAuditDifferences": ({'outbox_audit_other_differences_total{topic="orders"}': 1}, {}),
    "OutboxAuditSkips": (
        {'outbox_audit_skipped_minutes_total{topic="orders"}': 2},
        {'outbox_audit_skipped_minutes_total{topic="orders"}': 1},
    ),
    "OutboxAuditBehind": ({'outbox_audit_verified_until_timestamp_seconds{topic="orders"}': NOW - 3_700}, {}),
    "ConsumerGone": (dict.fromkeys(CONSUMER), {}),
    "ConsumerServerAway": ({'outbox_consumer_postgres_up{group="g"}': 0}, {}),
    "ConsumerStandsStill": ({'outbox_consumer_last_round_timestamp_seconds{group="g"}': 0}, {}),
    "ConsumerPartitionStandsStill": ({f"outbox_consumer_last_progress_timestamp_seconds{OF_PARTITION}": 0}, {}),
    "ConsumerLagGrows": (
        {f"outbox_consumer_lag_messages{OF_PARTITION}": 200_000},
        {f"outbox_consumer_lag_messages{OF_PARTITION}": 100_000},
    ),
    "ConsumerUncommitted": ({f"outbox_consumer_uncommitted_messages{OF_PARTITION}": 5}, {}),
    "ConsumerFenced": ({'outbox_consumer_generation{group="g"}': 9}, {}),
    "ConsumerDeadLetters": ({f"outbox_consumer_dead_letters_waiting{OF_PARTITION}": 1}, {}),
    "ConsumerEffectStuck": ({f"outbox_consumer_reservations_stuck{OF_PARTITION}": 1}, {}),
    "ConsumerEffectOverdue": ({f"outbox_consumer_reservations_overdue_seconds{OF_PARTITION}": 400}, {}),
    "ConsumerLosses": ({'outbox_group_losses{group="g"}': 1}, {}),
}


# A pause explains neither the age of another topic's events nor why these pile up; its own may be as old as they are.
PAUSED: Shown = {
    'outbox_pauses{scope="topic"}': 1,
    "outbox_backlog_oldest_age_seconds": 9_000,
    'outbox_backlog_topic_oldest_age_seconds{topic="bills"}': None,
}
GREW: Shown = PAUSED | {"outbox_backlog_events": 11_000}
OLD: Shown = PAUSED | {'outbox_backlog_topic_oldest_age_seconds{topic="orders"}': 100}
# Long after its last scrape, and where it never had one.
STANDS: Shown = {
    f"outbox_group_wait_seconds{OF_INBOX}": 90_000,
    'outbox_group_last_progress_timestamp_seconds{group="inbox"}': NOW - 90_000,
}
KILLED: Shown = dict.fromkeys(CONSUMER) | {
    f"outbox_group_wait_seconds{OF_PARTITION}": 90_000,
    'outbox_group_last_progress_timestamp_seconds{group="g"}': NOW - 90_000,
}
# As a job that a scheduler starts, between two runs.
NOTHING_WAITS: Shown = KILLED | dict.fromkeys(
    series for series in GROUPS if series.startswith(("outbox_group_lag_messages{", "outbox_group_wait_seconds{"))
)
# Outboxes by their names: what they show now and before, and their alerts; None: whatever they are. Each of these shows
# what explains an alert, of itself alone.
OUTBOXES: dict[str, tuple[Shown, Shown, set[str] | None]] = {
    "well": ({}, {}, set()),
    **{alert: (now, before, {alert}) for alert, (now, before) in FAILURES.items()},
    "retries": ({"outbox_events_retrying": 3}, {}, None),
    "everything is paused": ({'outbox_pauses{scope="all"}': 1}, {}, None),
    "not counted": ({"outbox_backlog_oldest_age_seconds": None}, {}, None),
    "a paused topic": (PAUSED, GREW, {"OutboxPaused"}),
    "a paused topic, and another that stands still": (
        *(OLD, GREW),
        {"OutboxPaused", "OutboxBacklogOld", "OutboxBacklogGrows"},
    ),
    "an inbox's dead letter": ({'outbox_group_dead_letters{group="inbox"}': 1}, {}, {"ConsumerDeadLetters"}),
    "an inbox's call": ({'outbox_group_calls_stuck{group="inbox"}': 1}, {}, {"ConsumerEffectStuck"}),
    "a call without a caller": (
        {'outbox_group_calls_overdue_seconds{group="inbox"}': 400},
        {},
        {"ConsumerEffectOverdue"},
    ),
    "a job's dead letter, between two runs": (
        *(dict.fromkeys(CONSUMER) | NOTHING_WAITS | {'outbox_group_dead_letters{group="g"}': 1}, NOTHING_WAITS),
        {"ConsumerDeadLetters"},
    ),
    "an inbox that stands still": (STANDS, STANDS, {"ConsumerGone"}),
    "a consumer that was killed": (KILLED, KILLED, {"ConsumerGone"}),
    "a consumer that has ended": (NOTHING_WAITS, NOTHING_WAITS, set()),
    "a partition of an inbox": (
        {f"outbox_group_wait_seconds{OF_INBOX}": 400},
        {f"outbox_group_wait_seconds{OF_INBOX}": 400},
        {"ConsumerPartitionStandsStill"},
    ),
    # As one whose relay has not reached Postgres since it was started.
    "never shown": (dict.fromkeys(STATE), dict.fromkeys(STATE), {"OutboxNotPublishing"}),
    "two relays": ({}, {}, set()),
}


def shown(outbox: str, instead: Shown, instance: str | None = None) -> Samples:
    """Return what the processes of an outbox show to Prometheus."""
    found = {}
    for series, value in {**HEALTHY, **instead}.items():
        if value is not None:
            name, _, labels = series.rstrip("}").partition("{")
            labels = f'{labels}{"," if labels else ""}outbox="{outbox}",instance="{instance or outbox}"'
            found[f"{name}{{{labels}}}"] = float(value)
    return found


def test_every_alert_is_tried():
    assert set(FAILURES) == set(re.findall(r"- alert: (\w+)", RULES.read_text()))


def test_an_alert_is_that_of_the_outbox_that_fails_whatever_others_show():
    """All are evaluated at once: what explains or hides an alert of one does so of no other."""
    # Of two relays of an outbox only one shows its state.
    now = before = shown("two relays", dict.fromkeys(STATE), "second")
    for outbox, (instead, instead_before, _) in OUTBOXES.items():
        now, before = now | shown(outbox, instead), before | shown(outbox, instead_before)
    found: dict[str | None, set[str]] = defaultdict(set)
    for alert, outbox in firing_by_outbox(now, before):
        found[outbox].add(alert)
    expected = {outbox: alerts for outbox, (_, _, alerts) in OUTBOXES.items() if alerts is not None}
    assert found.keys() <= OUTBOXES.keys()
    assert {outbox: found[outbox] for outbox in expected} == expected


def test_an_outbox_that_nothing_shows_is_missed():
    assert firing_by_outbox({}) == {("OutboxNotPublishing", None)}
