"""Regions: moving operations into bodies, and back."""
