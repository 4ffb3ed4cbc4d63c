"""What operators see of consumer groups, and do to them."""
