"""Effects that generate the SQL for a job's rows."""
