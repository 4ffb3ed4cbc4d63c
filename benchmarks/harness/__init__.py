"""What the relay's benchmark is made of: servers, load, relays and peers, measures, scenarios, the report."""
