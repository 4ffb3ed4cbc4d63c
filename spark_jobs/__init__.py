"""Consumers: from Kafka into tables, each event applied once. Postgres is the only truth about how far they got."""
