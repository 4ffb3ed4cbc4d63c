"""A small shop: orders in Postgres, and an event for everything that happens to one."""
