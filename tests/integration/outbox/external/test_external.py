"""Effects outside the database: a real provider over HTTP, a real Postgres, and everything between them failing."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import Counter, defaultdict
from dataclasses import asdict, replace
from decimal import Decimal
from typing import Any

import external_support
import psycopg
import pytest
from external_support import Sink, in_thread, lease_runs_out, outbox_cli, payments, provider, sink
from psycopg.rows import dict_row
from support import wait_until
from typer.testing import CliRunner

from outbox.consumer.errors import ConsumerError
from outbox.errors import NotFound, SchemaError
from outbox.external import HttpCall, OutcomeUnknown, Refused, TryLater, http_call, reservations
from outbox.external.caller import Caller
from outbox.external.reservations import Chosen, ReservationAdmin
from relay.cli.app import app

__all__ = ["outbox_cli", "provider", "sink"]


def test_each_reservation_is_called_once_and_settled_with_its_sql(sink, provider):
    external = payments(provider.url)
    names = [f"o{n}" for n in range(20)]
    ids = sink.reserve(external, names)
    again = sink.rows("SELECT message_id, topic, part, message_offset, order_key FROM consumer.reservations")
    sink.write(external, [(*row, "Ordered", False, "other", 1) for row in again])
    sink.write(external, [(external_support.uuid7(), "t", 0, 99, "k", "Ordered", True, None, None)])
    # Two rows that a transform made of one message: the second call would be left out.
    lines = [(external_support.uuid7(), "t", 0, 100, "k", "Ordered", False, name, 1) for name in ("line1", "line2")]
    lines[1] = (lines[0][0], *lines[1][1:])
    with pytest.raises(psycopg.DataError, match=f"more than one row of message {lines[0][0]}"):
        sink.write(external, lines)
    assert sink.drain(external) == {"attempts": 20, "confirmed": 20}
    assert provider.standing() == Counter(names)
    assert sorted(request[2] for request in provider.requests()) == sorted(map(str, ids))
    assert sink.orders() == dict.fromkeys(names, ("paid", 1))
    answers = sink.rows("SELECT response, last_error, settled_at IS NOT NULL FROM consumer.reservations")
    assert all(set(response) == {"charge"} and error is None and at for response, error, at in answers)
    assert sink.drain(external) == {}
    assert len(provider.requests()) == 20


def test_the_sessions_that_are_given_may_have_rows_of_another_kind(sink, provider):
    external = payments(provider.url)
    sink.reserve(external, ["o1"])

    def connect():
        connection = sink.connect()
        connection.row_factory = dict_row
        return connection

    assert external.drain(connect, threading.Event()).confirmed == 1
    assert sink.orders() == {"o1": ("paid", 1)}


def test_whatever_becomes_of_the_answer_the_effect_counts_once(sink, provider):
    """A new order for each way to fail; in the end all are paid, once, and every attempt had the same key."""
    ways = {
        "dropped": ["drop"],
        "done-dropped": ["done-drop"],
        "failed": ["500", "503"],
        "done-failed": ["done-500", "done-500"],
        "half": ["done-half"],
        "busy": ["429", "425", "409", "408"],
        "token": ["401"],
        "moved": ["302"],
        "all": ["drop", "done-drop", "500", "429", "done-half"],
    }
    for name, orders in ways.items():
        provider.tell(name, *orders)
    external = payments(provider.url)
    sink.reserve(external, ways)
    attempts = sum(len(orders) + 1 for orders in ways.values())
    assert sink.drain(external) == {"attempts": attempts, "confirmed": len(ways), "retrying": attempts - len(ways)}
    assert provider.standing() == Counter(list(ways))
    assert sink.orders() == dict.fromkeys(ways, ("paid", 1))
    assert {name: len({key for _, _, key, _ in provider.requests(name)}) for name in ways} == dict.fromkeys(ways, 1)


def test_a_timeout_is_asked_again_and_retry_after_is_kept(sink, provider):
    call = HttpCall(f"{provider.url}/charges")
    began: defaultdict[str, list[float]] = defaultdict(list)

    def timed(one):
        order = one.request["order"]
        began[order].append(time.monotonic())
        # Only those that must not end by themselves have the short time: the others end, however slow the machine is.
        silent = order != "limited" and one.attempt == 1
        return call(one if silent else replace(one, timeout=60.0))

    external = payments(provider.url, call=timed, timeout=1.0, lease=90.0)
    provider.tell("slow", "done-stall")
    provider.tell("dribbling", "trickle")
    provider.tell("limited", "429:2")
    sink.reserve(external, ["slow", "dribbling", "limited"])
    assert sink.drain(external) == {"attempts": 6, "confirmed": 3, "retrying": 3}
    assert provider.standing() == Counter(["slow", "dribbling", "limited"])
    # By the caller's clock: how long a request is on its way differs.
    for name, pause in (("slow", 1.0), ("dribbling", 1.0), ("limited", 2.0)):
        first, second = began[name]
        assert second - first >= pause


def test_a_refusal_cancels_and_takes_back_what_may_have_happened(sink, provider):
    external = payments(provider.url, cancel=True)
    provider.tell("plain", "refuse")
    provider.tell("later", "429", "refuse")
    provider.tell("maybe", "done-drop", "refuse")
    provider.tell("cancel maybe", "done-drop", "503", "429")
    ids = dict(zip(("plain", "later", "maybe"), sink.reserve(external, ["plain", "later", "maybe"]), strict=True))
    assert sink.drain(external)["cancelled"] == 3
    assert sink.states() == dict.fromkeys(ids, "cancelled")
    assert sink.orders() == dict.fromkeys(ids, ("cancelled", 1))
    # What certainly did not happen is not taken back; what may have is, with one key for all attempts.
    assert [request[2:] for request in provider.requests(path="/cancel")] == [(f"{ids['maybe']}:cancel", "maybe")] * 4
    assert (provider.effects(), provider.standing()) == (["maybe"], Counter())
    assert all("HTTP" in error for (error,) in sink.rows("SELECT last_error FROM consumer.reservations"))


def test_without_a_cancel_a_refusal_after_an_open_attempt_is_for_people(sink, provider):
    external = payments(provider.url)
    provider.tell("maybe", "done-drop", "refuse")
    (message_id,) = sink.reserve(external, ["maybe"])
    assert sink.drain(external) == {"attempts": 2, "retrying": 1, "stuck": 1}
    with sink.connect() as connection:
        (shown,) = ReservationAdmin(connection, "consumer").find(Chosen("orders"))
        assert shown["unsure"]
        assert "no cancel is declared" in shown["last_error"]
        caller = Caller(external, sink.connect)
        caller.settle_by_hand(message_id, confirmed=True, why="seen at the provider")
        with pytest.raises(NotFound, match="neither stuck nor in conflict"):
            caller.settle_by_hand(message_id, confirmed=False, why="again")
    assert (sink.states(), sink.orders()) == ({"maybe": "confirmed"}, {"maybe": ("paid", 1)})
    audit = "SELECT what, why, details -> 'message_ids' ->> 0 FROM consumer.audit"
    assert sink.rows(audit) == [("external: confirmed by hand", "seen at the provider", str(message_id))]


def test_calls_of_a_key_keep_their_order_and_others_do_not_wait(sink, provider):
    external = payments(provider.url, order_by="message_key", workers=4)
    provider.tell("k1", "500", "done-drop")
    provider.tell("k3", "drop")
    provider.tell("others", "stall")
    keyed = [(f"k{n}", "k") for n in range(1, 6)]
    sink.reserve(external, [*keyed[:2], "others", *keyed[2:4]])
    sink.reserve(external, [keyed[4], ("none1", None), ("none2", None)])
    thread = in_thread(lambda: sink.drain(external))
    # While the one stalls, everything else is done.
    wait_until(lambda: sum(provider.standing().values()) == 7, what="all but the one that stalls")
    # What is being settled at this moment has a short one; one that is open for the call would end with it only.
    open_ones = (
        "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in transaction%'"
    )
    wait_until(lambda: not sink.rows(open_ones), what="no open transaction")
    assert (sink.states()["others"], len(provider.requests("others"))) == ("calling", 1)
    provider.release()
    thread.join(60)
    assert [name for name in provider.effects() if name.startswith("k")] == [name for name, _ in keyed]
    requests = [name for _, _, _, name in provider.requests() if name.startswith("k")]
    assert requests == ["k1", "k1", "k1", "k2", "k3", "k3", "k4", "k5"]
    assert set(sink.states().values()) == {"confirmed"}


def test_in_no_order_calls_of_a_key_go_out_together(sink, provider):
    external = payments(provider.url, order_by=None, workers=5)
    for n in range(5):
        provider.tell(f"k{n}", "stall")
    sink.reserve(external, [(f"k{n}", "k") for n in range(5)])
    thread = in_thread(lambda: sink.drain(external))
    wait_until(lambda: provider.most_at_once == 5, what="five calls at a time")
    provider.release()
    thread.join(60)
    assert set(sink.states().values()) == {"confirmed"}


def test_the_last_attempt_leaves_it_stuck_and_the_command_line_gets_it_going_again(sink, provider, outbox_cli):
    external = payments(provider.url, max_attempts=3)
    provider.tell("bad", *["500"] * 3)
    sink.reserve(external, [("bad", "k"), ("behind", "k"), ("free", "other")])
    assert sink.drain(external) == {"attempts": 4, "retrying": 2, "stuck": 1, "confirmed": 1}
    assert sink.states() == {"bad": "stuck", "behind": "reserved", "free": "confirmed"}
    assert len(provider.requests("bad")) == 3
    listed = outbox_cli("external", "list", "--json")
    (shown,) = listed["reservations"]
    assert (shown["attempts"], shown["waiting_behind"], shown["state"]) == (3, 1, "stuck")
    assert "HTTP 500" in shown["last_error"]
    assert outbox_cli("external", "retry", shown["message_id"], "--json") == {"retried": [shown["message_id"]]}
    figures = outbox_cli("external", "run", "cli_external:external", "--once", "--json")
    assert (figures["confirmed"], figures["stuck"]) == (2, 0)
    assert set(sink.states().values()) == {"confirmed"}
    assert provider.standing() == Counter(["bad", "behind", "free"])
    assert sink.rows("SELECT what FROM consumer.audit") == [("external: retry",)]


def test_by_hand_cancel_and_settle(sink, provider, outbox_cli):
    external = payments(provider.url, max_attempts=1)
    provider.tell("maybe", "done-drop")
    provider.tell("asked", "drop")
    maybe, asked = map(str, sink.reserve(external, ["maybe", "asked"]))
    assert sink.drain(external) == {"attempts": 2, "stuck": 2}
    (waiting,) = map(str, sink.reserve(external, ["unwanted"]))
    assert outbox_cli("external", "cancel", maybe, waiting, "--reason", "customer left", "--json") == {
        "cancelling": sorted([maybe, waiting])
    }
    settle = ("external", "settle", "cli_external:external", asked, "--as", "cancelled")
    assert outbox_cli(*settle, "--reason", "provider says no", "--json") == {"message_id": asked, "state": "cancelled"}
    figures = outbox_cli("external", "run", "cli_external:external", "--once", "--json")
    assert (figures["cancelled"], figures["confirmed"]) == (2, 0)
    assert sink.orders() == dict.fromkeys(("maybe", "asked", "unwanted"), ("cancelled", 1))
    # Nothing was done for the one that was never called, so nothing is taken back.
    assert [name for _, _, _, name in provider.requests(path="/cancel")] == ["maybe"]
    assert provider.standing() == Counter()
    assert "neither stuck" in outbox_cli(*settle, "--reason", "again", status=1)
    assert "no reservations" in outbox_cli("external", "retry", maybe, status=1)
    assert outbox_cli("external", "forget", "--days", "0", "--json") == {"forgotten": 3}
    assert sink.states() == {}


def test_a_redirect_may_follow_the_effect_and_is_taken_back_by_a_cancel(sink, provider):
    external = payments(provider.url, cancel=True, max_attempts=1)
    provider.tell("moved", "done-303")
    sink.reserve(external, ["moved"])
    assert sink.drain(external) == {"attempts": 1, "stuck": 1}
    with sink.connect() as connection:
        ReservationAdmin(connection, "consumer").cancel(Chosen(), "customer left")
    assert sink.drain(external) == {"attempts": 1, "cancelled": 1}
    assert (provider.effects(), provider.standing()) == (["moved"], Counter())


def test_a_call_that_may_have_happened_is_not_repeated_once_the_key_is_forgotten(sink, provider):
    external = payments(provider.url, key_seconds=0.001)
    provider.tell("maybe", "drop")
    provider.tell("sure", "429")
    (message_id, _) = sink.reserve(external, ["maybe", "sure"])
    assert sink.drain(external) == {"attempts": 3, "retrying": 2, "stuck": 1, "confirmed": 1}
    assert len(provider.requests("maybe")) == 1
    with sink.connect() as connection:
        desk = ReservationAdmin(connection, "consumer")
        assert "may have forgotten the key" in desk.find(Chosen())[0]["last_error"]
        desk.retry(Chosen(message_ids=[message_id]))
        assert sink.drain(external) == {"stuck": 1}
        desk.retry(Chosen(message_ids=[message_id]), not_done=True)
    assert sink.drain(external) == {"attempts": 1, "confirmed": 1}
    assert provider.standing() == Counter(["maybe", "sure"])


@pytest.mark.parametrize("wrong", ["at the call", "at its repetition"])
def test_by_either_clock_a_key_may_be_forgotten(sink, provider, monkeypatch, wrong):
    """The database's is two days ahead at the call and then corrected, or it has gone back since."""
    external = payments(provider.url, first_wait=60.0, longest_wait=60.0)
    provider.tell("maybe", "done-drop")
    sink.reserve(external, ["maybe"])
    by_days = {"at the call": (-2, 0), "at its repetition": (0, 2)}[wrong]
    for days in by_days:
        monkeypatch.setattr(reservations, "_CLOCK", lambda days=days: time.time() + days * 86_400)
        done = sink.drain(external, until="due")
        sink.rows("UPDATE consumer.reservations SET next_attempt_at = now() RETURNING 1")
    assert done == {"stuck": 1}
    assert len(provider.requests("maybe")) == 1


def test_with_an_ask_the_provider_is_asked_before_a_call_is_repeated(sink, provider):
    external = payments(provider.url, ask=True, key_seconds=0.001, key_suffix="-fee")
    provider.tell("done", "done-drop")
    provider.tell("not-done", "drop")
    message_id, _ = sink.reserve(external, ["done", "not-done"])
    assert sink.drain(external) == {"attempts": 4, "retrying": 2, "confirmed": 2}
    assert [len(provider.requests(name)) for name in ("done", "not-done")] == [1, 2]
    assert len(provider.requests(path="/charges/")) == 2
    assert provider.requests("done")[0][2] == f"{message_id}-fee"
    assert provider.standing() == Counter(["done", "not-done"])


def test_a_lookup_that_is_refused_cancels_nothing(sink, provider):
    """The charge was made and its answer lost, and these credentials may not look it up: only an operator can know."""
    external = payments(provider.url, ask=True, cancel=True, max_attempts=4)
    provider.tell("o", "done-drop")
    (message_id,) = sink.reserve(external, ["o"])
    provider.tell(f"look {message_id}", *["403"] * 3)
    assert sink.drain(external) == {"attempts": 4, "retrying": 3, "stuck": 1}
    assert sink.rows("SELECT state, unsure FROM consumer.reservations") == [("stuck", True)]
    assert sink.orders() == {}
    assert provider.standing() == Counter(["o"])
    assert provider.requests(path="/cancel") == []


def test_when_the_sql_fails_the_answer_is_kept_and_nothing_is_called_again(sink, provider):
    external = payments(
        provider.url, cancel=True, max_attempts=3, on_confirmed="INSERT INTO paid VALUES (%(response)s -> 'charge')"
    )
    provider.tell("refused", "done-drop", "refuse")
    with sink.connect() as connection:
        connection.execute("ALTER TABLE orders ADD CHECK (state <> 'cancelled')")
    sink.reserve(external, ["o1", "refused"])
    assert sink.drain(external)["stuck"] == 2
    assert sink.states() == {"o1": "stuck", "refused": "stuck"}
    assert len(provider.requests(path="/cancel")) == 1
    with sink.connect() as connection:
        errors = [row["last_error"] for row in ReservationAdmin(connection, "consumer").find(Chosen())]
        assert "UndefinedTable" in errors[0]
        assert "CheckViolation" in errors[1]
        connection.execute("CREATE TABLE paid (charge jsonb)")
        connection.execute("ALTER TABLE orders DROP CONSTRAINT orders_state_check")
        ReservationAdmin(connection, "consumer").retry(Chosen())
    assert sink.drain(external) == {"attempts": 2, "confirmed": 1, "cancelled": 1}
    assert len(provider.requests("o1")) == 1
    assert len(provider.requests(path="/cancel")) == 1
    assert sink.rows("SELECT count(*) FROM paid") == [(1,)]


def swallowed(cursor, settled):
    with contextlib.suppress(psycopg.Error):
        cursor.execute("SELECT 1 / 0")


def ended(cursor, settled):
    cursor.execute("ROLLBACK")


@pytest.mark.parametrize(
    ("effect", "error"),
    [
        (swallowed, "an error of the database was caught"),
        (ended, "the transaction was ended"),
        ("INSERT INTO late DEFAULT VALUES", "RaiseException: not yet"),
    ],
    ids=["caught", "ended", "deferred"],
)
def test_sql_that_fails_no_earlier_than_at_the_commit_has_failed_too(sink, provider, effect, error):
    """An error that the function hides, or one that a deferred trigger raises."""
    with sink.connect() as connection:
        connection.execute("CREATE TABLE late (n int)")
        connection.execute(
            "CREATE FUNCTION late() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'not yet'; END $$"
        )
        connection.execute(
            "CREATE CONSTRAINT TRIGGER late AFTER INSERT ON late DEFERRABLE INITIALLY DEFERRED "
            "FOR EACH ROW EXECUTE FUNCTION late()"
        )
    external = payments(provider.url, max_attempts=2, on_confirmed=effect)
    (message_id,) = sink.reserve(external, ["o1"])
    assert sink.drain(external) == {"attempts": 2, "retrying": 1, "stuck": 1}
    assert sink.states() == {"o1": "stuck"}
    assert len(provider.requests("o1")) == 1
    assert error in sink.rows("SELECT last_error FROM consumer.reservations")[0][0]
    with pytest.raises(ConsumerError, match=error):
        Caller(external, sink.connect).settle_by_hand(message_id, confirmed=True, why="it is")
    assert sink.states() == {"o1": "stuck"}


def test_an_answer_after_the_lease_is_weighed(sink, provider):
    """The first attempt outlives its lease; another caller goes on, and the first answer comes when all is settled."""
    answered, outcomes = threading.Event(), {}

    def slow(call):
        if call.attempt == 1:
            assert answered.wait(60)
        elif call.request["order"] == "b":
            raise Refused("no")
        return {"attempt": call.attempt}

    external = payments(provider.url, call=slow, cancel=lambda call: "back", timeout=60.0, lease=90.0, workers=2)
    sink.reserve(external, ["a", "b"])
    stop = threading.Event()
    first = Caller(external, sink.connect)
    thread = in_thread(lambda: outcomes.update(asdict(first.run(stop, "stopped"))))
    wait_until(lambda: sink.states() == {"a": "calling", "b": "calling"}, what="the claims")
    lease_runs_out(sink)
    assert sink.drain(external) == {"attempts": 3, "confirmed": 1, "cancelled": 1, "retrying": 1}
    answered.set()
    # Not by its reports: it also reports that its calls do not keep their time-out, when it comes to look.
    wait_until(lambda: first.counts.late + first.counts.conflicts >= 2, what="the late answers")
    stop.set()
    thread.join(60)
    assert (outcomes["late"], outcomes["conflicts"]) == (1, 1)
    assert sink.states() == {"a": "confirmed", "b": "cancelled"}
    assert sink.orders() == {"a": ("paid", 1), "b": ("cancelled", 1)}
    with sink.connect() as connection:
        (shown,) = ReservationAdmin(connection, "consumer").find(Chosen())
    assert (shown["request"]["order"], shown["conflict"]) == (
        "b",
        "the provider confirmed a call whose effect was cancelled",
    )


def test_answers_that_are_odd(sink, provider):
    """What a user's functions give and raise: kept as far as jsonb can, and never taken for a success by mistake."""
    odd: dict[str, Any] = {"nul": "a\0b", "nan": float("nan"), "set": {1}, "surrogate": "\ud800", "none": None}
    odd["escape"] = {"path": r"C:\u0000"}
    raised: dict[str, BaseException] = {
        "later": TryLater("not yet"),
        "unknown": OutcomeUnknown("hm\0\ud800"),
        "bug": KeyError("x"),
        "exit": SystemExit(),
    }

    def call(one):
        order = one.request["order"]
        if order in raised and one.attempt == 1:
            raise raised[order]
        return odd.get(order)

    with sink.connect() as connection:
        connection.execute("CREATE TABLE answers (request jsonb, response jsonb)")
    external = payments(provider.url, call=call, on_confirmed="INSERT INTO answers VALUES (%(request)s, %(response)s)")
    sink.reserve(external, [*odd, *raised])
    assert sink.drain(external) == {"attempts": 14, "confirmed": 10, "retrying": 4}
    stored = dict(sink.rows("SELECT request ->> 'order', response FROM consumer.reservations"))
    assert dict(sink.rows("SELECT request ->> 'order', response FROM answers")) == stored
    assert (stored["set"], stored["none"], stored["nul"]) == ("{1}", None, {"text": r"'a\x00b'"})
    assert stored["escape"] == odd["escape"]


@pytest.mark.parametrize(
    "amount", ["1.000000000000000001", "12345678901234567.89", "-0.1", "1e400", "1e-300", "7" * 5000]
)
def test_no_number_is_rounded_on_its_way_to_the_provider_and_back(sink, provider, amount):
    """It answers with the very bytes that it was sent."""
    effect = "INSERT INTO amounts VALUES ((%(request)s ->> 'a')::numeric, (%(response)s ->> 'a')::numeric)"
    with sink.connect() as connection:
        connection.execute("CREATE TABLE amounts (sent numeric, answered numeric)")
    provider.tell("o", "echo")
    http, seen = HttpCall(f"{provider.url}/charges"), list[Any]()

    def call(one: Any) -> Any:
        seen.append(one.request["a"])
        return http(one)

    request = f"""jsonb_build_object('order', order_id) || '{{"a": {amount}}}'::jsonb"""
    external = payments(provider.url, call=call, request=request, on_confirmed=effect)
    sink.reserve(external, ["o"])
    assert sink.drain(external) == {"attempts": 1, "confirmed": 1}
    assert Decimal(repr(seen[0]) if isinstance(seen[0], float) else seen[0]) == Decimal(amount)
    query = "SELECT sent = %s::numeric, answered = %s::numeric, (response ->> 'a')::numeric = %s::numeric"
    query += " FROM amounts, consumer.reservations"
    assert sink.rows(query, amount, amount, amount) == [(True, True, True)]


def test_no_number_is_rounded_in_what_an_operator_sees(sink):
    numbers = ["12345678901234567.89", "1.000000000000000001", "12.34", str(10**30), f"1{'0' * 400}", "7" * 5000]
    sink.reserve(payments("http://localhost"), ["a"])
    texts = [f"[{', '.join(numbers)}]", f'{{"paid": {numbers[0]}}}']
    with sink.connect() as connection:
        connection.execute("UPDATE consumer.reservations SET state = 'stuck', request = %s, response = %s", texts)
        (found,) = ReservationAdmin(connection, "consumer").find(Chosen())
        assert [Decimal(repr(one) if isinstance(one, float) else one) for one in found["request"]] == [
            Decimal(one) for one in numbers
        ]
    done = CliRunner().invoke(app, ["external", "list", "--json"], env={"OUTBOX_DATABASE_URL": sink.url})
    assert done.exit_code == 0, done.output
    (shown,) = json.loads(done.stdout, parse_int=str, parse_float=str)["reservations"]
    assert (shown["request"], shown["response"]) == (numbers, {"paid": numbers[0]})


def test_an_answer_with_a_number_that_postgres_lacks_is_stored_all_the_same(sink):
    answers = {"huge": "1e200000", "tiny": "1e-200000", "beyond": "1e9999999999999999999", "nan": "NaN"}
    external = payments(
        "http://localhost", call=lambda one: http_call._json(b'{"a": %s}' % answers[one.request["order"]].encode())
    )
    sink.reserve(external, list(answers))
    assert sink.drain(external) == {"attempts": 4, "confirmed": 4}


def test_an_ask_that_gives_something_else_is_not_taken_for_an_answer(sink, provider):
    asked: list[Any] = [True, None]
    external = payments(provider.url, ask=lambda call: asked.pop(0))
    provider.tell("o", "done-drop")
    sink.reserve(external, ["o"])
    assert sink.drain(external) == {"attempts": 3, "retrying": 2, "confirmed": 1}
    assert len(provider.requests("o")) == 2


def test_tables_that_are_not_there_are_said_to_be_missing(outbox_postgres, provider):
    outbox_postgres.connect(autocommit=True).execute("DROP SCHEMA consumer CASCADE")
    sink = Sink(outbox_postgres.url)
    with pytest.raises(SchemaError, match="outbox db upgrade --consumer"):
        sink.drain(payments(provider.url))
