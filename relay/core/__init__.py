"""The protocol: lanes, turns and their outcomes. No module here imports a driver; begin with ports, then loop."""
