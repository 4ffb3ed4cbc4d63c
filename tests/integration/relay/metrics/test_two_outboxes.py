"""Two outboxes on one Prometheus: what goes wrong in one is an alert of that one, whatever the other one shows.

promtool evaluates the real rules; what relays and consumers really show is in test_alerts.py and the runbooks' tests.
"""

from __future__ import annotations

import re

import pytest
from alerting import RULES, Samples, firing_by_outbox

from relay.core.pauses import ScopeKind

ILL, WELL = "ill", "well"
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
}
# The relay sees these whether their consumers run or not.
OF_INBOX = '{group="inbox",topic="t",partition="0"}'
GROUPS: Samples = {
    'outbox_group_lag_messages{group="g",topic="t"}': 5,
    f"outbox_group_wait_seconds{OF_PARTITION}": 5,
    'outbox_group_last_progress_timestamp_seconds{group="g"}': NOW,
    'outbox_group_lag_messages{group="inbox",topic="t"}': 5,
    f"outbox_group_wait_seconds{OF_INBOX}": 5,
    'outbox_group_last_progress_timestamp_seconds{group="inbox"}': NOW,
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
}


def shown(outbox: str, instead: Shown) -> Samples:
    """Return what the processes of an outbox show to Prometheus."""
    found = {}
    for series, value in {**HEALTHY, **instead}.items():
        if value is not None:
            name, _, labels = series.rstrip("}").partition("{")
            found[f'{name}{{{labels}{"," if labels else ""}outbox="{outbox}",instance="{outbox}"}}'] = float(value)
    return found


def test_nothing_fires_while_both_are_well():
    assert firing_by_outbox(shown(ILL, {}) | shown(WELL, {})) == set()


def test_every_alert_is_tried():
    assert set(FAILURES) == set(re.findall(r"- alert: (\w+)", RULES.read_text()))


def of_all(outboxes: dict[str, Shown]) -> Samples:
    """Return what the processes of several outboxes show."""
    return {series: value for outbox, instead in outboxes.items() for series, value in shown(outbox, instead).items()}


def test_a_failure_of_one_outbox_is_an_alert_of_that_one():
    """Each failure is in an outbox of its own, which is called after the alert, beside one that is well."""
    now = of_all({alert: now for alert, (now, _) in FAILURES.items()} | {WELL: {}})
    before = of_all({alert: before for alert, (_, before) in FAILURES.items()} | {WELL: {}})
    assert firing_by_outbox(now, before) == {(alert, alert) for alert in FAILURES}


MASKED = ("OutboxNotPublishing", "OutboxBacklogOld", "OutboxBacklogUnknown", "OutboxBacklogGrows")


@pytest.mark.parametrize(
    "masks",
    [
        {"outbox_events_retrying": 3},
        {'outbox_pauses{scope="topic"}': 1},
        {'outbox_pauses{scope="all"}': 1},
        NO_RELAY,
        {"outbox_backlog_oldest_age_seconds": None},
    ],
    ids=["retries", "paused topic", "all paused", "no relay", "not counted"],
)
def test_what_explains_one_outbox_does_not_explain_the_other(masks):
    now = of_all({alert: FAILURES[alert][0] for alert in MASKED} | {"other": masks})
    before = of_all({alert: FAILURES[alert][1] for alert in MASKED} | {"other": {}})
    found = firing_by_outbox(now, before)
    assert {(name, outbox) for name, outbox in found if outbox != "other"} == {(alert, alert) for alert in MASKED}


def test_a_paused_topic_does_not_explain_the_age_of_another():
    """Its own events may be as old as they are. Nor is a pause the reason for which another topic's events pile up."""
    paused: Shown = {'outbox_pauses{scope="topic"}': 1, "outbox_backlog_oldest_age_seconds": 9_000}
    paused['outbox_backlog_topic_oldest_age_seconds{topic="bills"}'] = None
    before = shown(ILL, paused | {"outbox_backlog_events": 11_000})
    assert firing_by_outbox(shown(ILL, paused), before) == {("OutboxPaused", ILL)}
    old = shown(ILL, paused | {'outbox_backlog_topic_oldest_age_seconds{topic="orders"}': 100})
    assert firing_by_outbox(old, before) == {
        (alert, ILL) for alert in ("OutboxPaused", "OutboxBacklogOld", "OutboxBacklogGrows")
    }


def test_a_group_of_which_nothing_moves_is_gone_for_as_long_as_that_is_so():
    """Long after its last scrape, and where it never had one; the other outbox has a group of the same name."""
    stands: Shown = {f"outbox_group_wait_seconds{OF_INBOX}": 90_000}
    stands['outbox_group_last_progress_timestamp_seconds{group="inbox"}'] = NOW - 90_000
    now = shown(ILL, stands) | shown(WELL, {})
    assert firing_by_outbox(now, now) == {("ConsumerGone", ILL)}
    killed = dict.fromkeys(CONSUMER) | {f"outbox_group_wait_seconds{OF_PARTITION}": 90_000}
    killed['outbox_group_last_progress_timestamp_seconds{group="g"}'] = NOW - 90_000
    now = shown(ILL, killed) | shown(WELL, {})
    assert firing_by_outbox(now, now) == {("ConsumerGone", ILL)}
    # Nothing waits: as a job that a scheduler starts, between two runs.
    for name in ("lag_messages{", "wait_seconds{"):
        killed |= {series: None for series in GROUPS if series.startswith(f"outbox_group_{name}")}
    assert firing_by_outbox(shown(ILL, killed), shown(ILL, killed)) == set()


def test_a_partition_of_an_inbox_that_stands_still_while_others_move():
    stands: Shown = {f"outbox_group_wait_seconds{OF_INBOX}": 400}
    assert firing_by_outbox(shown(ILL, stands) | shown(WELL, {})) == {("ConsumerPartitionStandsStill", ILL)}


def test_a_relay_that_has_never_shown_its_outbox_is_missed():
    """As one that has not reached Postgres since it was started, beside an outbox that is well."""
    never = shown(ILL, dict.fromkeys(STATE))
    assert firing_by_outbox(never | shown(WELL, {})) == {("OutboxNotPublishing", ILL)}


def test_a_relay_without_a_first_lane_explains_nothing_of_another_outbox():
    """Of two relays of an outbox only one shows its state."""
    second = {
        series.replace('instance="ill"', 'instance="second"'): value
        for series, value in shown(ILL, dict.fromkeys(STATE)).items()
    }
    assert firing_by_outbox(shown(ILL, {}) | second | shown(WELL, {})) == set()


def test_an_outbox_that_nothing_shows_is_missed():
    assert firing_by_outbox({}) == {("OutboxNotPublishing", None)}
