"""A consumer group in Postgres, for whoever reads Kafka: inbox, transformers, effects outside the database, Spark jobs.

groups      claims, positions, ids        letters     dead letters          losses       what Kafka lost
messages    what a message of Kafka says  ids         the day in an id      tables       with SQLAlchemy
statements  over these tables             retention   which ids are kept    stalled      partitions that do not move
admin       what operators see and do     kafka_admin requests to Kafka     connections  sessions of Postgres

Knows neither Spark nor pydantic, and only ``tables`` imports SQLAlchemy: Spark's executors import it too.
"""
