"""Prometheus metrics of relays and of the outbox."""
