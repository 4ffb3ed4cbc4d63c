"""Effects outside of the sink's database, once."""
