"""Doors to and from other systems."""
