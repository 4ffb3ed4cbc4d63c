"""A database's address in its two forms: libpq's URL and SQLAlchemy's.

libpq has its own rules: a password may contain ``#`` and ``?``, but not ``/`` and ``@``. So addresses are parsed by
libpq itself, which comes with the extra ``psycopg``, and only the host, port and database that it finds are ever shown.
No error raised here quotes a part of the address, nor does an exception in its chain: any part that can't be parsed may
hold a password.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import quote

from outbox.errors import ConfigurationError, MissingExtra

_SCHEMES: Final = frozenset(
    {"postgresql", "postgres", "postgresql+psycopg", "postgresql+psycopg2", "postgresql+asyncpg"}
)

_UNREADABLE: Final = (
    "invalid database URL; it must look like postgresql://user:password@host:port/database, special "
    "characters in it written as %40 and so on"
)
_AMBIGUOUS: Final = (
    "invalid database URL: it has an unexpected @; in user, password, database and options write / as %2F, @ as %40 "
    "and % as %25"
)
_PORT: Final = (
    "the port in the database URL must be a number from 1 to 65535; in a password write / as %2F and @ as %40"
)

_DATABASE_OPTION: Final = {"asyncpg": "database"}
"""What drivers of SQLAlchemy call the database's name, where it is not as in libpq."""


def libpq_url(url: str) -> str:
    """Return the address for libpq (psycopg): ``postgresql://…``, or ``host=… dbname=…`` unchanged.

    Raises ConfigurationError when libpq can't parse it. The error quotes only the scheme of the address.
    """
    address = _with_libpq_scheme(url)
    _parameters(address)
    return address


def sqlalchemy_url(url: str, driver: str = "psycopg") -> str:
    """Return the address for SQLAlchemy with this driver: ``postgresql+psycopg://…``. Needs psycopg for any driver."""
    found = _parameters(_with_libpq_scheme(url))
    return _compose(f"postgresql+{driver}", found, quoted_database=_DATABASE_OPTION.get(driver, "dbname"))


def with_database(url: str, database: str) -> str:
    """Return the address, for libpq, of another database on the same server."""
    return _compose("postgresql", _parameters(_with_libpq_scheme(url)) | {"dbname": database}, sockets_in_host=True)


def display_url(url: str) -> str:
    """Return the address without user, password and options, for logs and screens.

    Raises ConfigurationError when libpq can't parse it.
    """
    found = _parameters(_with_libpq_scheme(url))
    hosts = found.get("host") or found.get("hostaddr") or ""
    if not hosts:
        shown = f"service {found['service']}" if "service" in found else "local"
    else:
        shown = ",".join(
            (f"[{host}]" if ":" in host else host) + (f":{port}" if port else "") for host, port in _hosts(found, hosts)
        )
    database = found.get("dbname")
    if database is None:
        return f"postgresql://{shown}"
    # libpq parses such a database name as a whole address.
    return f"postgresql://{shown}/{'…' if '=' in database or '://' in database else database}"


def _with_libpq_scheme(url: str) -> str:
    scheme, separator, rest = url.partition("://")
    # In `host=h options=a://b`, or `password=a://b`, the separator belongs to a value.
    if separator and "=" not in scheme:
        if scheme in _SCHEMES:
            return f"postgresql://{rest}"
        if scheme.replace("+", "").isalnum() and len(scheme) <= 24:
            raise ConfigurationError(f"the database URL must start with postgresql://, this one starts with {scheme!r}")
    elif "=" in url:
        return url
    raise ConfigurationError("the database URL must look like postgresql://user:password@host:port/database")


def _parameters(address: str) -> dict[str, str]:
    """Parse an address with libpq. Raises ConfigurationError."""
    found = _read_by_libpq(address)
    # Not raised in the handler: the handled error would be its context, and that one quotes the address.
    if found is None:
        raise ConfigurationError(_UNREADABLE)
    if address.startswith("postgresql://"):
        # libpq ends the password at the first @, and the host at a / before it: the rest of such a password would
        # become a host, a port or a database, which are shown.
        rest = address.removeprefix("postgresql://")
        at, slash = rest.find("@"), rest.find("/")
        if "@" in (rest[at + 1 :] if slash < 0 or at < slash else rest):
            raise ConfigurationError(_AMBIGUOUS)
    # The host is an address or a part of one. The name of an abstract socket begins with an @.
    if any("@" in host[1:] or "://" in host for host in found.get("host", "").split(",")):
        raise ConfigurationError(_AMBIGUOUS)
    for port in found.get("port", "").split(","):
        if port and not (port.isascii() and port.isdecimal() and 0 < int(port) < 65536):
            raise ConfigurationError(_PORT)
    return found


def _read_by_libpq(address: str) -> dict[str, str] | None:
    # A service that writes through asyncpg or psycopg2 may have no psycopg, or one without libpq.
    try:
        import psycopg
        from psycopg.conninfo import conninfo_to_dict
    except ModuleNotFoundError as error:
        raise MissingExtra("psycopg", error.name or "psycopg") from error
    except ImportError as error:
        raise MissingExtra("psycopg", "psycopg", "finds no libpq") from error
    # libpq, written in C, stops reading at a NUL.
    if "\0" in address:
        return None
    try:
        return {name: str(value) for name, value in conninfo_to_dict(address).items() if value is not None}
    except (psycopg.Error, UnicodeError):
        return None


def _hosts(found: dict[str, str], hosts: str) -> list[tuple[str, str]]:
    names, ports = hosts.split(","), found.get("port", "").split(",")
    if len(ports) == 1:
        ports *= len(names)
    return list(zip(names, ports + [""] * (len(names) - len(ports)), strict=False))


def _compose(
    scheme: str, found: dict[str, str], *, sockets_in_host: bool = False, quoted_database: str | None = None
) -> str:
    """Return an address. SQLAlchemy accepts several hosts, the directory of a socket and a zone only after the ``?``.

    quoted_database   the option for a database whose name has to be quoted; None: it stays in the path. SQLAlchemy 2.0
                      takes the path as it stands, without unquoting it.
    """
    rest = dict(found)
    user, password, database = (rest.pop(name, None) for name in ("user", "password", "dbname"))
    text = f"{scheme}://"
    if user is not None or password is not None:
        text += quote(user or "", safe="") + ("" if password is None else f":{quote(password, safe='')}") + "@"
    host = rest.get("host", "")
    if host and (sockets_in_host or not ("," in host or "%" in host or host.startswith(("/", "@")))):
        text += ",".join(
            (f"[{quote(name, safe=':')}]" if ":" in name else quote(name, safe="")) + (f":{port}" if port else "")
            for name, port in _hosts(found, host)
        )
        del rest["host"]
        rest.pop("port", None)
    elif host and "port" in rest and "," not in rest["port"]:
        # libpq takes one port for all hosts, SQLAlchemy does not.
        rest["port"] = ",".join(port for _, port in _hosts(found, host))
    if quoted_database is not None and database is not None and quote(database, safe="") != database:
        rest[quoted_database], database = database, None
    if database is not None or rest:
        text += "/" + quote(database or "", safe="")
    if rest:
        text += "?" + "&".join(f"{name}={quote(value, safe='/,')}" for name, value in rest.items())
    return text
