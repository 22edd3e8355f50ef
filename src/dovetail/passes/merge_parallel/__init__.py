"""Sibling products merged into one wider product."""
