"""The relay's use of Kafka: producers, topics, markers, and fencing."""
