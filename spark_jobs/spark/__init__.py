"""What is Spark's own: sessions, rows, errors, packages for a cluster."""
