"""A request that is nested deeper than Python's parser goes ends no caller: it is sent as it is, and can be listed."""

from __future__ import annotations

from external_support import payments, sink
from typer.testing import CliRunner

from outbox.external import Call, TryLater, exact_json
from relay.cli.app import app

__all__ = ["sink"]

DEEP = '{"cents": ' + "[" * 3000 + "12.340" + "]" * 3000 + ', "order": "deep"}'


def test_it_is_called_and_settled_beside_the_others(sink):
    sent: dict[str, str] = {}

    def call(call: Call) -> None:
        sent[call.key] = exact_json.dumps(call.request)

    external = payments("http://localhost", call=call)
    ids = sink.reserve(external, ["a", "deep", "b"])
    sink.rows("UPDATE consumer.reservations SET request = %s WHERE message_id = %s RETURNING 1", DEEP, ids[1])
    assert sink.drain(external) == {"attempts": 3, "confirmed": 3}
    assert sink.states() == dict.fromkeys(("a", "deep", "b"), "confirmed")
    assert sink.orders() == dict.fromkeys(("a", "deep", "b"), ("paid", 1))
    assert sent[str(ids[1])] == DEEP


def test_it_is_listed_as_it_is(sink):
    def call(_: Call) -> None:
        raise TryLater("not today")

    external = payments("http://localhost", call=call, max_attempts=1)
    sink.reserve(external, ["deep"])
    sink.rows("UPDATE consumer.reservations SET request = %s RETURNING 1", DEEP)
    sink.drain(external)
    assert sink.states() == {"deep": "stuck"}
    done = CliRunner().invoke(app, ["external", "list", "--json"], env={"OUTBOX_DATABASE_URL": sink.url})
    assert done.exit_code == 0, done.output
    assert DEEP in done.stdout
