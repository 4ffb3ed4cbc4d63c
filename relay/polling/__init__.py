"""The table as the source: a worker reads the rows of its lanes, and deletes published ones."""
