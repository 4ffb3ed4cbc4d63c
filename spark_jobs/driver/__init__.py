"""What runs in the driver: rounds, and all that decides what a round reads."""
