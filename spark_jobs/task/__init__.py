"""What an executor runs: one range of one partition. Imports neither pyspark.sql nor sqlalchemy."""
