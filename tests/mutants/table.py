"""The mutants: one change of the source each, the promise that it breaks, and the tests that must fail with it.

Where the relay's protocol promises it, its invariant is named: docs/explanation/protocol.tla.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_CONTRACT: Final = "tests/integration/outbox/consumer/test_group_contract.py"
_MOST: Final = "tests/integration/outbox/consumer/test_group_at_most_once.py"
_INBOX: Final = "tests/integration/outbox/inbox"
_RELAY: Final = "tests/integration/relay"
_WRITER: Final = "tests/integration/outbox/test_writer"


@dataclass(frozen=True, slots=True)
class Mutant:
    """``old`` occurs once in the file and becomes ``new``. ``tests`` are pytest's arguments."""

    name: str
    breaks: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTANTS: Final = (
    # The relay
    Mutant(
        "lease_without_owner",
        "OneMaySettle: one holder of a lane",
        "relay/settle/statements.py",
        'OURS: Final = "l.lane = m.lane AND l.epoch = m.epoch AND l.owner = %(owner)s"',
        'OURS: Final = "l.lane = m.lane AND l.epoch = m.epoch"',
        (f"{_RELAY}/kafka/test_equal_epochs.py",),
    ),
    Mutant(
        "lease_without_epoch",
        "OneMaySettle: one holder of a lane",
        "relay/settle/statements.py",
        'OURS: Final = "l.lane = m.lane AND l.epoch = m.epoch AND',
        'OURS: Final = "l.lane = m.lane AND',
        (f"{_RELAY}/core/test_source_contract.py", f"{_RELAY}/core/test_lane_leases.py"),
    ),
    Mutant(
        "settle_by_number_alone",
        "NoLoss: a restored table uses numbers again",
        "relay/settle/statements.py",
        " AND e.event_id = p.row_event_id",
        "",
        (f"{_RELAY}/settle/test_settled_behind.py",),
    ),
    Mutant(
        "mark_rises_at_once",
        "EachIsPublished: a transaction may commit a lower number late",
        "relay/polling/low_water_mark.py",
        "self._ended = xmin() >= self._xid",
        "self._ended = True",
        (f"{_RELAY}/polling/test_low_water_mark.py",),
    ),
    Mutant(
        "first_messages_together",
        "OrderOfAKey: a broker takes a request behind a producer's first one that it refused",
        "outbox/_clients/first_messages.py",
        "return partition is not None and partition not in self._topics[topic].sent",
        "return False",
        (f"{_RELAY}/kafka/test_publisher.py",),
    ),
    Mutant(
        "first_records_together",
        "no loss: librdkafka takes one acknowledgement for two",
        "outbox/transform/_first_records.py",
        "            self._await(topic, cold)",
        "            return partition, cold",
        ("tests/integration/outbox/transform/test_first_records.py",),
    ),
    Mutant(
        "ends_of_two_transactions",
        "no loss: a late EndTxn ends a part of the next transaction",
        "outbox/transform/_session.py",
        "            if not clean:\n                self._replace_producer()\n",
        "",
        ("tests/integration/outbox/transform/test_ends.py",),
    ),
    Mutant(
        "positions_of_two_transactions",
        "no double: a late TxnOffsetCommit sets back what later transactions have moved",
        "outbox/transform/_session.py",
        "list(positions.values())), CLEAN_OFFSETS_SECONDS)",
        "list(positions.values())))",
        ("tests/integration/outbox/transform/test_ends.py",),
    ),
    Mutant(
        "first_messages_of_no_transaction",
        "NoLoss: librdkafka takes one acknowledgement for two",
        "relay/kafka/transactional.py",
        "class _TransactionalProducer(OrderedProducer):",
        "class _TransactionalProducer(OrderedProducer.__base__):",
        (f"{_RELAY}/kafka/test_publisher.py",),
    ),
    Mutant(
        "first_messages_pass_a_refused_one",
        "OrderOfAKey: a key waits behind its refused event",
        "relay/kafka/ordered.py",
        "            else:\n                waiting.add(key)\n",
        "",
        (f"{_RELAY}/kafka/test_publisher.py",),
    ),
    Mutant(
        "minutes_end_within_turns",
        "OrderOfAKey: an event is the first one only if none of its key is before it",
        "outbox/_clients/first_messages.py",
        "self.now - known.since < _KNOWN_SECONDS",
        "time.monotonic() - known.since < _KNOWN_SECONDS",
        ("tests/unit/relay/kafka/test_ordered.py",),
    ),
    Mutant(
        "sent_ahead_and_passed_over",
        "NeverBlind: what is committed is in the lane's marker",
        "relay/kafka/producer.py",
        " and ahead.get(position, NOT_SENT) is not None:",
        ":",
        ("tests/unit/relay/kafka/test_ordered.py", f"{_RELAY}/kafka/test_publisher.py"),
    ),
    Mutant(
        "freed_keys_overtake",
        "OrderOfAKey: of a key that was blocked",
        "relay/polling/reader.py",
        "        for lane in self._freed(batches):\n            del batches[lane]\n",
        "        self._freed(batches)\n",
        (f"{_RELAY}/polling/test_freed_keys.py",),
    ),
    Mutant(
        "failures_block_nothing",
        "OrderOfAKey: of a key that is blocked",
        "relay/polling/reader.py",
        "            reads.append(Read(unblocked, values, [lane], marks, many=many))",
        "            reads.append(Read(self._queries.read, {**values, 'lanes': array([lane]), 'above': "
        "array([values['above']]), 'after': array([values['after']]), 'limits': array([values['limit']])}, [lane], "
        "marks, many=many))",
        (f"{_RELAY}/settle/test_retries.py", f"{_RELAY}/polling/test_many_failures.py"),
    ),
    Mutant(
        "commit_without_confirmation",
        "NoDouble: never commit what another relay has taken",
        "relay/kafka/transactional.py",
        "if confirm is not None and (unconfirmed := confirm(deadline)):",
        "if confirm is not None and (unconfirmed := confirm(deadline)) and False:",
        (f"{_RELAY}/core/test_publisher_contract.py", "tests/unit/relay/core"),
    ),
    Mutant(
        "slow_commit_is_clean",
        "NoDouble: a commit that was slow may have been sent twice",
        "relay/kafka/transactional.py",
        "sender.suspicious = sender.suspicious or time.monotonic() - started >= self._clean_seconds",
        "sender.suspicious = False",
        (f"{_RELAY}/settle/test_late_commits.py",),
    ),
    Mutant(
        "slot_confirmed_early",
        "NoLoss: the slot passes nothing that a lane has not settled",
        "relay/wal/session.py",
        "while self._ends and all(map(int.__ge__, done, self._ends[0][2])):",
        "while self._ends and (done or True):",
        (f"{_RELAY}/wal/test_history.py",),
    ),
    Mutant(
        "neighbours_first_marker",
        "a lane takes no marker of a neighbour that has, or had, the same name",
        "relay/core/marker.py",
        "not self.positions and self.outbox in {None, here.outbox}",
        "not self.positions",
        (f"{_RELAY}/settle/test_adoption.py",),
    ),
    Mutant(
        "damaged_markers_read",
        "a damaged marker is an error",
        "relay/kafka/client.py",
        '"check.crcs": True',
        '"check.crcs": False',
        (f"{_RELAY}/kafka/test_damaged_markers.py",),
    ),
    Mutant(
        "lanes_change_in_flight",
        "NeverBlind: the marker of a killed relay is looked for in its lane",
        "outbox/_app/migrate.py",
        "if in_flight := _count(connection, table, table.c.transactional_id.is_not(None)):",
        "if in_flight := 0:",
        (f"{_RELAY}/core/test_lanes_under_load.py",),
    ),
    Mutant(
        "lanes_of_before",
        "EachIsPublished: when the number of lanes changes, each event is in one of them",
        "outbox/_app/migrate.py",
        "sa.Computed(expression, ",
        "sa.Computed(lane_expression(256), ",
        (f"{_RELAY}/core/test_lane_count.py",),
    ),
    Mutant(
        "sends_after_its_lease",
        "OrderOfAKeyWithGaps: an at-most-once relay that wakes late sends nothing, its heir has sent later events",
        "relay/kafka/idempotent.py",
        "if self._leases[lane].remaining_seconds > self._delivery_seconds:",
        "if True:",
        (f"{_RELAY}/kafka/test_publisher.py", "tests/acceptance/test_at_most_once.py"),
    ),
    # The audit
    Mutant(
        "sums_are_not_compared",
        "what is on Kafka is what was committed",
        "relay/audit/comparison.py",
        " and here.wholes == wholes.get(window, NOTHING)",
        "",
        (f"{_RELAY}/audit/test_audit.py",),
    ),
    Mutant(
        "certificates_are_not_chained",
        "no line of a certificate can be changed",
        "relay/audit/certificate.py",
        ' or values.get("previous") != before:',
        ":",
        (f"{_RELAY}/audit/test_certificate.py",),
    ),
    Mutant(
        "audit_counts_twice",
        "a minute is audited once",
        "relay/audit/follow.py",
        " WHERE v.verified_until = %(since)s",
        "",
        (f"{_RELAY}/audit/test_follow.py",),
    ),
    Mutant(
        "waiting_is_verified",
        "a minute is verified when nothing of it is under way",
        "relay/audit/follow.py",
        "if waits or one.state == OPEN or",
        "if",
        (f"{_RELAY}/audit/test_follow.py",),
    ),
    Mutant(
        "open_transactions_are_over",
        "a minute is verified when nothing of it can come",
        "relay/audit/transactions.py",
        "if number <= oldest]",
        "if number]",
        (f"{_RELAY}/audit/test_follow.py",),
    ),
    Mutant(
        "retries_are_counted_again",
        "the ledger counts each event once",
        "relay/audit/ledger.py",
        " WHERE NOT from_relay",
        "",
        (f"{_RELAY}/audit/test_ledger.py",),
    ),
    # The core of the consumers
    Mutant(
        "fence_without_generation",
        "an older claim changes nothing",
        "outbox/consumer/groups.py",
        " or row[2] != here.generation",
        "",
        (_CONTRACT,),
    ),
    Mutant(
        "fence_without_position",
        "what was committed is not applied again",
        "outbox/consumer/groups.py",
        "if row[1] > here.next_offset:",
        "if False:",
        (_CONTRACT,),
    ),
    Mutant(
        "claim_does_not_shut_out",
        "an older claim changes nothing",
        "outbox/consumer/groups.py",
        "DO UPDATE SET generation = g.generation + 1,",
        "DO UPDATE SET generation = g.generation,",
        (_CONTRACT,),
    ),
    Mutant(
        "other_topic_of_the_same_name",
        "a topic that was created again is a loss",
        "outbox/consumer/losses.py",
        "if here.topic_id != topic_id:",
        "if topic_id is None:",
        (f"{_INBOX}/test_waiting.py", f"{_INBOX}/test_outages.py"),
    ),
    Mutant(
        "retention_is_no_loss",
        "what Kafka has deleted is a loss",
        "outbox/consumer/losses.py",
        "if here.next_offset < there.first:",
        "if False:",
        (f"{_INBOX}/test_waiting.py", f"{_INBOX}/test_outages.py"),
    ),
    Mutant(
        "odd_header_passes",
        "a hostile header ends no member of a group",
        "outbox/consumer/messages.py",
        "        except (SystemError, UnicodeDecodeError) as error:\n            found.append(",
        "        except ZeroDivisionError as error:\n            found.append(",
        ("tests/integration/outbox/consumer/test_hostile_messages.py",),
    ),
    Mutant(
        "any_time_is_stored",
        "a hostile timestamp ends no member of a group",
        "outbox/consumer/messages.py",
        "return min(max(milliseconds, FIRST_TIME), LAST_TIME)",
        "return milliseconds",
        ("tests/integration/outbox/consumer/test_hostile_messages.py",),
    ),
    Mutant(
        "any_day_is_a_day",
        "an id of the year 10000 ends no member of a group",
        "outbox/consumer/ids.py",
        "return NO_TIME + dt.timedelta(days) if days <= LAST_DAY else NO_TIME",
        "return NO_TIME + dt.timedelta(days)",
        ("tests/integration/outbox/consumer/test_hostile_messages.py",),
    ),
    Mutant(
        "what_is_lost_has_an_effect",
        "at-most-once: what is recorded as lost never comes late",
        "outbox/consumer/groups.py",
        "_CONFIRM, partition, **values).rowcount == 0:",
        "_CONFIRM, partition, **values).rowcount < 0:",
        (_MOST,),
    ),
    Mutant(
        "a_claim_records_no_loss",
        "at-most-once: each loss is recorded",
        "outbox/consumer/groups.py",
        "        self.lose(connection, generation)\n        return {",
        "        return {",
        (_MOST,),
    ),
    Mutant(
        "a_failing_handler_keeps_its_changes",
        "at-most-once: a message that is recorded as lost has no effect",
        "outbox/inbox/_at_most_once.py",
        "            with connection.transaction():\n",
        "            if True:\n",
        (f"{_INBOX}/test_at_most_once.py",),
    ),
    Mutant(
        "a_failing_task_records_no_loss",
        "at-most-once: each loss is recorded, without a claim too",
        "spark_jobs/postgres/at_most_once.py",
        "for partition, (span, _) in sorted(self._ahead.items()):",
        "for partition, (span, _) in ():",
        ("tests/integration/spark_jobs/task/test_task_at_most_once.py",),
    ),
    # Transforms, and effects outside the database
    Mutant(
        "positions_first",
        "no loss: positions are committed with the records",
        "outbox/transform/_session.py",
        "        began = self._firsts.begin()\n",
        "        self._consumer.commit(offsets=list(positions.values()), asynchronous=False)\n"
        "        began = self._firsts.begin()\n",
        ("tests/acceptance/test_transform_records.py",),
    ),
    Mutant(
        "key_of_each_attempt",
        "once: a call that is made again has the same key",
        "outbox/external/caller.py",
        'key = f"{claim.message_id}{external.key_suffix}"',
        'key = f"{claim.message_id}{external.key_suffix}-{claim.attempt}"',
        ("tests/integration/outbox/external/test_external.py",),
    ),
    Mutant(
        "claim_asynchronous",
        "once: a crash of the sink does not lose that a call was made",
        "outbox/external/reservations.py",
        "\nRETURNING {synchronous}",
        "",
        ("tests/integration/outbox/external/test_failures.py",),
    ),
    # The inbox
    Mutant(
        "stays_paused",
        "a partition that comes back is read on",
        "outbox/inbox/_member.py",
        "        kafka.resume(found)\n",
        "",
        (f"{_INBOX}/test_rebalances.py",),
    ),
    Mutant(
        "repeats_are_applied",
        "once: a repeat has no effect",
        "outbox/inbox/_applier.py",
        "                if id_ not in new:\n                    continue\n",
        "",
        (f"{_INBOX}/test_consumer.py",),
    ),
    Mutant(
        "forgotten_ids_are_new",
        "once: what may have been applied is not applied",
        "outbox/inbox/_applier.py",
        "if NO_TIME < day(id_) < before:",
        "if False:",
        (f"{_INBOX}/test_failing_messages.py",),
    ),
    Mutant(
        "letters_hold_nothing_back",
        "order of a key behind a dead letter",
        "outbox/inbox/_applier.py",
        "behind = [message.key() in part.dead_keys for message in batch]",
        "behind = [False for message in batch]",
        (f"{_INBOX}/test_failing_messages.py",),
    ),
    Mutant(
        "spoilt_transactions_pass",
        "the effect and the position are one transaction",
        "outbox/inbox/_applier.py",
        "if (text := spoilt(connection)) is not None:",
        "if (text := spoilt(connection)) is not None and False:",
        (f"{_INBOX}/test_failing_messages.py",),
    ),
    # The writer
    Mutant(
        "autocommit_is_taken",
        "business rows and events are one transaction",
        "outbox/_sending.py",
        "        self._require_transaction(connection)\n        # Not",
        "        # Not",
        (f"{_WRITER}_refusals.py",),
    ),
    Mutant(
        "keys_are_not_locked",
        "order: writers of one key take turns",
        "outbox/_statements.py",
        '    locks, condition = _locks() if lock_key else ("", "")\n    given',
        '    locks, condition = "", ""\n    given',
        (f"{_WRITER}_order.py",),
    ),
    Mutant(
        "locks_in_any_order",
        "writers of several keys do not deadlock",
        "outbox/_statements.py",
        'key FROM given ORDER BY 1"',
        'key FROM given"',
        (f"{_WRITER}_order.py",),
    ),
    Mutant(
        "events_before_rows",
        "a session sends rows and events in the order of the code",
        "outbox/_sending.py",
        "            session.flush()\n",
        "            pass\n",
        (f"{_WRITER}_targets.py", f"{_WRITER}_transactions.py"),
    ),
    Mutant(
        "relay_headers_are_taken",
        "a writer's event can't pose as a copy of the relay",
        "outbox/event.py",
        'if lower in RESERVED_HEADERS or lower.startswith(("ce_", RELAY_HEADER_PREFIX)):',
        "if lower in RESERVED_HEADERS:",
        ("tests/unit/outbox/test_event.py",),
    ),
)
