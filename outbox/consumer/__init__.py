"""A consumer group in Postgres, for whoever reads Kafka: inbox, transformers, effects outside the database, Spark jobs.

groups   claims, positions, ids          letters  dead letters           losses   what Kafka lost, found and recorded
messages what a message of Kafka says    ids      the day in an id       tables   the tables (the one with SQLAlchemy)
admin    what operators see and do       kafka_admin, connections        requests to Kafka, sessions of Postgres

Knows neither Spark nor pydantic, and only ``tables`` imports SQLAlchemy: Spark's executors import it too.
"""
