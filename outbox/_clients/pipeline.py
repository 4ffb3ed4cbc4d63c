"""Statements that are sent before the first answer is awaited."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg


@contextmanager
def pipeline(connection: psycopg.Connection[Any]) -> Iterator[None]:
    """Open psycopg's pipeline for the block; raise the first error of its statements, at the end of the block at last.

    A fast server answers while the block still sends. psycopg raises that error inside the block, then logs a warning
    about the statements behind it, which Postgres skips: https://www.postgresql.org/docs/current/libpq-pipeline-mode.html
    """
    first: psycopg.Error | None = None
    try:
        with connection.pipeline():
            try:
                yield
            except psycopg.Error as error:
                first = error
    except psycopg.Error:
        if first is None:
            raise
    if first is not None:
        raise first
