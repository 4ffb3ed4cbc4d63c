"""The relay's side of Kafka: the topic of markers, and fencing of a producer that may still live."""
