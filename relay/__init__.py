"""The relay: reads events from the outbox and publishes them to Kafka, in order per key."""
