"""What runs beside the turns: the archive, scheduled events, the repair of slots."""
