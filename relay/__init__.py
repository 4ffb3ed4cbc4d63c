"""The relay: takes events out of the outbox and publishes them to Kafka, in order per key."""
