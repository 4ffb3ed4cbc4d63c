"""Postgres as the sink: connections, tables, transactions."""
