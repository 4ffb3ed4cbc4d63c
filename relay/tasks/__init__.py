"""What runs beside the turns: the archive, scheduled events, the repair of slots, the watch of hanging transactions."""
