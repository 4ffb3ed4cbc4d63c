"""The code that executors run, for one range of one partition. Imports neither pyspark.sql nor sqlalchemy."""
