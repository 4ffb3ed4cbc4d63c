"""The relay's HTTP endpoints."""
