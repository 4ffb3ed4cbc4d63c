"""`outbox doctor` on a database in which somebody has planted functions, and the tables call them."""

from __future__ import annotations

import pytest
from psycopg import sql
from rows_and_roles import login_role

from outbox._app import migrate as db
from outbox._clients.checks import Level
from relay.audit.ledger import turn_on
from relay.config import load
from relay.operations.doctor import examine


@pytest.fixture
def mallory(outbox_postgres):
    """A role that may do nothing but what everybody may, in a database whose ``public`` is open."""
    with outbox_postgres.connect(autocommit=True) as admin, login_role(admin, "mallory") as name:
        yield name


PLANTED = """
CREATE FUNCTION public.hashtextextended(text, integer) RETURNS bigint LANGUAGE sql IMMUTABLE RETURN 1::bigint;
CREATE FUNCTION public.equals(varchar, varchar) RETURNS boolean LANGUAGE sql IMMUTABLE RETURN true;
CREATE OPERATOR public.= (FUNCTION = public.equals, LEFTARG = varchar, RIGHTARG = varchar);
CREATE FUNCTION public.noted() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END';
GRANT EXECUTE ON FUNCTION public.noted() TO PUBLIC"""
# As the first revision made it, in a database whose public is open.
TABLES = """
ALTER TABLE outbox.events DROP COLUMN lane;
ALTER TABLE outbox.events ADD COLUMN lane smallint NOT NULL GENERATED ALWAYS AS
    (abs(mod(hashtextextended(aggregate_id, 0), 4::bigint))::smallint) STORED;
ALTER TABLE outbox.events ADD PRIMARY KEY (lane, id);
ALTER TABLE consumer.groups ADD CONSTRAINT named CHECK (owner::varchar = owner::varchar);
CREATE INDEX hashed ON outbox.failures (hashtextextended(aggregate_id, 0));
CREATE TRIGGER noted BEFORE INSERT ON outbox.scheduled FOR EACH ROW EXECUTE FUNCTION public.noted()"""


def found(database, kafka) -> set[tuple[Level, str, str]]:
    given = load(database_url=database.url, kafka={"bootstrap.servers": kafka.bootstrap_servers})
    names = ("schema public", "outbox.", "consumer.")
    return {
        (finding.level, finding.about, finding.found.partition(", which")[0])
        for finding in examine(given)
        if finding.about.startswith(names)
    }


def test_what_others_have_planted_is_named(outbox_postgres, outbox_kafka, mallory):
    assert found(outbox_postgres, outbox_kafka) == set()
    with outbox_postgres.connect(autocommit=True) as admin:
        admin.execute("GRANT CREATE ON SCHEMA public TO PUBLIC")
        admin.execute(sql.SQL("SET ROLE {}").format(sql.Identifier(mallory)))
        admin.execute(PLANTED)
        admin.execute("RESET ROLE")
        admin.execute(TABLES)
    said = "every role may create in it, and so plant functions that others with it in their search path call"
    everything = found(outbox_postgres, outbox_kafka)
    opened = {one for one in everything if one[1] == "schema public"}
    assert [(level, text[: len(said)]) for level, _, text in opened] == [(Level.WARNING, said)]
    hashed = "hashtextextended(text,integer)"
    assert everything - opened == {
        (Level.FAILURE, "outbox.events", f"its column lane calls public.{hashed}"),
        (Level.FAILURE, "outbox.failures", f"its index hashed calls public.{hashed}"),
        (Level.FAILURE, "outbox.scheduled", "its trigger noted calls public.noted()"),
        (
            Level.FAILURE,
            "consumer.groups",
            "its constraint named calls operator public.=(character varying,character varying)",
        ),
    }
    # The way out.
    with outbox_postgres.connect(autocommit=True) as admin:
        admin.execute("REVOKE CREATE ON SCHEMA public FROM PUBLIC; DROP INDEX outbox.hashed")
        admin.execute("DROP TRIGGER noted ON outbox.scheduled; ALTER TABLE consumer.groups DROP CONSTRAINT named")
    db.change_lanes(outbox_postgres.url, 4)
    assert found(outbox_postgres, outbox_kafka) == set()


def test_a_trigger_of_the_owners_own_is_a_warning(outbox_postgres, outbox_kafka):
    with outbox_postgres.connect(autocommit=True) as admin:
        admin.execute("CREATE FUNCTION public.own() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END'")
        admin.execute("CREATE TRIGGER own BEFORE INSERT ON outbox.relays FOR EACH ROW EXECUTE FUNCTION public.own()")
    assert found(outbox_postgres, outbox_kafka) == {
        (Level.WARNING, "outbox.relays", "its trigger own calls public.own()")
    }


def test_a_function_of_the_ledger_that_is_not_the_owners_is_named(outbox_postgres, outbox_kafka):
    with outbox_postgres.connect(autocommit=True) as admin, login_role(admin, "former") as former:
        turn_on(admin, "outbox", None)
        assert found(outbox_postgres, outbox_kafka) == set()
        ours = "ALTER FUNCTION outbox.count_in_ledger() OWNER TO {}"
        admin.execute(sql.SQL(ours).format(sql.Identifier(former)))
        ((level, about, text),) = found(outbox_postgres, outbox_kafka)
        assert (level, about) == (Level.FAILURE, "outbox.events")
        assert text == f"its trigger outbox_ledger calls outbox.count_in_ledger() with the rights of {former}"
        # The tables are another's, and their function a superuser's.
        admin.execute(sql.SQL(ours).format(sql.SQL("CURRENT_USER")))
        admin.execute(sql.SQL("ALTER TABLE outbox.events OWNER TO {}").format(sql.Identifier(former)))
        assert len(found(outbox_postgres, outbox_kafka)) == 1
