"""Real servers on loopback: a Postgres and a Kafka, without Docker."""
