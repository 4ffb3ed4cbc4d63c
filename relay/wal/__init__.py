"""The write-ahead log as the source of events."""
