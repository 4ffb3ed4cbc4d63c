"""One database, two spellings of its address: libpq's URL and SQLAlchemy's."""

from __future__ import annotations

from urllib.parse import urlsplit

from outbox.errors import ConfigurationError

_SCHEMES = {"postgresql", "postgres", "postgresql+psycopg", "postgresql+psycopg2", "postgresql+asyncpg"}


def libpq_url(url: str) -> str:
    """Give the address as libpq (psycopg) reads it: ``postgresql://…``.

    Raises ConfigurationError when the scheme is not one of Postgres's.
    """
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in _SCHEMES:
        raise ConfigurationError(
            f"the database URL must start with postgresql://, this one starts with {scheme[:24]!r}"
            if separator
            else "the database URL must look like postgresql://user@host:port/database"
        )
    return f"postgresql://{rest}"


def sqlalchemy_url(url: str, driver: str = "psycopg") -> str:
    """Give the address as SQLAlchemy reads it, for the driver named: ``postgresql+psycopg://…``."""
    return libpq_url(url).replace("postgresql://", f"postgresql+{driver}://", 1)


def display_url(url: str) -> str:
    """Give the address without user, password and options, for logs and screens."""
    parts = urlsplit(libpq_url(url))
    # Not parts.port: libpq takes several hosts with a port each.
    hosts = parts.netloc.rpartition("@")[2] or "local"
    return f"postgresql://{hosts}{parts.path}"
