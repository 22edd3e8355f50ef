"""Rules that propose what belongs together."""
