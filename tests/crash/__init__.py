"""Jobs that are killed, and stores that fail."""
