"""What operators do to an outbox, and what it looks at for them."""
