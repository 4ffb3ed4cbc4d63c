"""Database addresses: read as libpq reads them, and shown without a password, whatever characters it has.

The property: nothing that is shown or raised depends on the password. So each text is either the one that a plain
password leads to, or one of the constant texts of an address that can't be read.
"""

from __future__ import annotations

import string
import sys
import traceback
from collections.abc import Callable, Iterator
from urllib.parse import quote

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy import make_url

from outbox._app.schema_connection import connected
from outbox.consumer import postgres_errors as postgres
from outbox.consumer.retention import IdRetention
from outbox.errors import ConfigurationError, MissingExtra
from outbox.urls import display_url, libpq_url, sqlalchemy_url, with_database
from relay.config import load
from relay.database import Connector
from relay.wal.replication import Replication
from spark_jobs.postgres.group_store import PostgresGroupStore
from spark_jobs.postgres.sink import transaction
from spark_jobs.task.input import NO_INPUT

PLAIN = "plainpassword"
PRINTABLE = st.text(string.digits + string.ascii_letters + string.punctuation + " ä€", min_size=4, max_size=24)
# The characters that mean something in an address are drawn far more often.
HOSTILE = st.text("#?/@%:&=,'\\ []+ab1", min_size=4, max_size=12)
PASSWORDS = st.one_of(PRINTABLE, HOSTILE)

# No server listens on port 1.
SPELLINGS: dict[str, Callable[[str], str]] = {
    "raw": lambda password: f"postgresql://user:{password}@127.0.0.1:1/shop",
    "encoded": lambda password: f"postgresql://user:{quote(password, safe='')}@127.0.0.1:1/shop",
    "sqlalchemy": lambda password: f"postgresql+psycopg://user:{quote(password, safe='')}@127.0.0.1:1/shop",
    "sqlalchemy raw": lambda password: f"postgresql+psycopg://user:{password}@127.0.0.1:1/shop",
    "no user": lambda password: f"postgresql://:{password}@127.0.0.1:1/shop",
    "option": lambda password: f"postgresql://user@127.0.0.1:1/shop?password={quote(password, safe='')}",
    "several hosts": lambda password: f"postgresql://user:{password}@127.0.0.1:1,127.0.0.1:1/shop",
    "socket": lambda password: f"postgresql://user:{password}@%2Fnowhere/shop",
    "words": lambda password: f"host=127.0.0.1 port=1 dbname=shop user=user password={quoted(password)}",
}
# One address for each reason to refuse one: the errors have nothing of it.
REFUSED = ("postgresql://u:%zz@h", "postgresql://u:p@p@h", "postgresql://u:p/p", "host=h password='p")


def quoted(value: str) -> str:
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def outcome(act: Callable[[str], object], url: str) -> str:
    """Return all that a caller could print: the value, or the error with everything it is chained to."""
    try:
        return str(act(url))
    except Exception as error:  # noqa: BLE001  whatever it is, a caller could print it
        return "".join(everything(error))


def everything(error: BaseException | None) -> Iterator[str]:
    """Also contexts that `from None` only hides, and what errors hold beside their text."""
    if error is not None:
        yield f"{error!s}\n{error!r}\n{error.args!r}\n{vars(error).keys()!r}\n"
        yield "".join(traceback.format_exception(error))
        yield from everything(error.__cause__)
        if error.__context__ is not error.__cause__:
            yield from everything(error.__context__)


def independent(act: Callable[[str], object], spelling: str, password: str) -> None:
    plain = outcome(act, SPELLINGS[spelling](PLAIN))
    assert PLAIN not in plain
    text = outcome(act, SPELLINGS[spelling](password))
    if text != plain:
        assert text in {outcome(act, url) for url in REFUSED}, spelling


@settings(max_examples=50)
@given(password=PASSWORDS)
@example("pa#ss")
@example("pa?ss")
@example("pa/ss")
@example("pa@ss")
@example("pa%ss")
@example("pa%zz")
@example("pa%ffss")
@example("5432/pa")
@example("12/3?user=pa")
@example("12/3?host=pa&password=")
@example("a b=c")
def test_what_is_shown_does_not_depend_on_the_password(password):
    for spelling in SPELLINGS:
        independent(display_url, spelling, password)


def opened(url: str) -> None:
    with connected(url):
        pass


def began(url: str) -> None:
    with transaction(url, "test", NO_INPUT):
        pass


CONNECTS: dict[str, Callable[[str], object]] = {
    "relay": lambda url: Connector(url, "test")(),
    "replication": lambda url: Replication(url, "test"),
    "db": opened,
    "sink": lambda url: postgres.connect(url, "test"),
    "task": began,
    "driver": lambda url: PostgresGroupStore(url, "consumer", "group", "owner").stored(["topic"]),
    "upkeep": lambda url: IdRetention(url, "consumer", 14).make(),
    "settings": lambda url: load(database_url=url),
}


@pytest.mark.parametrize("connect", CONNECTS)
@settings(max_examples=30)
@given(password=PASSWORDS, spelling=st.sampled_from(sorted(SPELLINGS)))
@example("pa/ss", "raw")
@example("pa@ss", "raw")
@example("pa%zz", "raw")
@example("pa%ffss", "raw")
@example("12/pass", "raw")
def test_no_error_of_a_failed_connection_has_the_password(connect, password, spelling):
    independent(CONNECTS[connect], spelling, password)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://u:secret@h/db", "postgresql://h/db"),
        ("postgres://u:se#cr?et@h:5433/db", "postgresql://h:5433/db"),
        ("postgresql+psycopg://u:secret@h/db?sslmode=require", "postgresql://h/db"),
        ("postgresql+asyncpg://u:s%2Fe%40cret@h", "postgresql://h"),
        (
            "postgresql://u:secret@one:5432,two:5433/db?target_session_attrs=read-write",
            "postgresql://one:5432,two:5433/db",
        ),
        ("postgresql:///db?host=one,two&port=5432", "postgresql://one:5432,two:5432/db"),
        ("postgresql://u:secret@[::1]:5/db", "postgresql://[::1]:5/db"),
        ("postgresql:///db?host=/run/pg", "postgresql:///run/pg/db"),
        ("postgresql://%2Frun%2Fpg/db", "postgresql:///run/pg/db"),
        ("postgresql://", "postgresql://local"),
        ("postgresql:///db", "postgresql://local/db"),
        ("host=h port=1 dbname=db password='s e'", "postgresql://h:1/db"),
        ("hostaddr=127.0.0.1 password=secret", "postgresql://127.0.0.1"),
        ("service=shop", "postgresql://service shop"),
        ("dbname='host=h password=secret'", "postgresql://local/…"),
        ("postgresql://h/postgres%3A%2F%2Fu%3Asecret%40h", "postgresql://h/…"),
    ],
)
def test_display_url(url, shown):
    assert display_url(url) == shown


@pytest.mark.parametrize(
    "url",
    [
        "nonsense",
        "",
        "mysql://h/db",
        "sec ret://h/db",
        "postgresql://u:pa/ss@h/db",
        "postgresql://u:pa@ss@h/db",
        "postgresql://u:12/pass@h/db",
        "postgresql://u:pa%zz@h/db",
        "postgresql://h:0/db",
        "postgresql://h:65536/db",
        "postgresql://h/db?nope=1",
        "postgresql://u:pa\0ss@h/db",
        "postgresql://u:pa\udcffss@h/db",
        "host=h password='a",
        "host=postgresql://u:secret@h",
        "host=u:secret@h",
    ],
)
def test_addresses_that_are_refused(url):
    for read in (libpq_url, display_url, sqlalchemy_url):
        with pytest.raises(ConfigurationError) as caught:
            read(url)
        assert (caught.value.__cause__, caught.value.__context__) == (None, None)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:pa#s?s@h:5/d%2Fb?sslmode=require",
        "postgresql://u:p%20%40%2F%25@one:1,two:2/db",
        "postgresql:///db?host=/run/pg&port=5433",
        "postgresql://u:p@[::1]:5/db",
        "host=h port=1 dbname='d b' user=u password='p\\'@/'",
    ],
)
def test_every_spelling_means_the_same(url):
    meant = conninfo_to_dict(libpq_url(url))
    assert conninfo_to_dict(libpq_url(sqlalchemy_url(url))) == meant
    assert conninfo_to_dict(with_database(url, "x/y=1")) == meant | {"dbname": "x/y=1"}
    _, arguments = make_url(sqlalchemy_url(url)).get_dialect()().create_connect_args(make_url(sqlalchemy_url(url)))
    arguments["port"] = str(arguments["port"])
    assert {name: value for name, value in arguments.items() if name in meant} == meant


@pytest.mark.parametrize(("driver", "option"), [("psycopg", "dbname"), ("psycopg2", "dbname"), ("asyncpg", "database")])
def test_a_database_whose_name_has_to_be_quoted(driver, option):
    url = make_url(sqlalchemy_url("postgresql://u@h:5/a%20b%2Fc%3F", driver))
    _, arguments = url.get_dialect()().create_connect_args(url)
    assert (arguments[option], arguments["host"]) == ("a b/c?", "h")


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
@pytest.mark.parametrize("hosts", ["a,b", "/tmp,b", "a,b,c"])
def test_several_hosts_may_have_one_port(hosts, driver):
    """SQLAlchemy wants one for each."""
    url = make_url(sqlalchemy_url(f"host={hosts} port=5433 dbname=d", driver))
    _, found = url.get_dialect()().create_connect_args(url)
    ports = [5433] * len(hosts.split(","))
    expected = (hosts, ",".join(map(str, ports))) if driver == "psycopg" else (hosts.split(","), ports)
    assert (found["host"], found["port"]) == expected


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
@pytest.mark.parametrize("url", ["postgresql://[fe80::1%25eth0]:5/d", "host=fe80::1%eth0 port=5 dbname=d"])
def test_the_zone_of_an_ipv6_address_is_kept(url, driver):
    meant = {"host": "fe80::1%eth0", "port": "5", "dbname": "d"}
    assert conninfo_to_dict(libpq_url(with_database(url, "x"))) == meant | {"dbname": "x"}
    address = make_url(sqlalchemy_url(url, driver))
    _, found = address.get_dialect()().create_connect_args(address)
    assert (found["host"], str(found["port"])) == (meant["host"], meant["port"])
    assert conninfo_to_dict(libpq_url(sqlalchemy_url(url))) == meant


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise ModuleNotFoundError('x', name='psycopg')", "psycopg is not installed"),
        ("raise ImportError('no pq wrapper available')", "psycopg finds no libpq"),
    ],
)
def test_without_psycopg_or_libpq_the_extra_is_named(tmp_path, monkeypatch, code, said):
    (tmp_path / "psycopg.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "psycopg"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(MissingExtra, match=rf"{said}; run: pip install 'outbox-kafka\[psycopg\]'") as caught:
        libpq_url("postgresql://u:secret@h/db")
    assert (caught.value.extra, "secret" in str(caught.value)) == ("psycopg", False)


def test_an_at_sign_in_an_option_is_said_to_be_one():
    said = "it has an unexpected @; in user, password, database and options write / as %2F, @ as %40 and % as %25"
    with pytest.raises(ConfigurationError, match=said):
        libpq_url("postgresql://u@h/db?application_name=a@b")
    assert libpq_url("postgresql://u@h/db?application_name=a%40b").endswith("a%40b")


def test_usual_addresses_stay_as_they_are():
    assert libpq_url("postgresql+psycopg://u:p%40@h:5/db?a=b".replace("?a=b", "")) == "postgresql://u:p%40@h:5/db"
    assert sqlalchemy_url("postgresql://localhost/shop") == "postgresql+psycopg://localhost/shop"
    assert sqlalchemy_url("postgresql://u@h:1/db", "asyncpg") == "postgresql+asyncpg://u@h:1/db"
    assert with_database("postgresql://u@h:1/db", "other") == "postgresql://u@h:1/other"
