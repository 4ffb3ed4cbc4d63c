"""Clients of Postgres and Kafka, for every part: how they connect, verify, and explain their errors."""
