"""Repeated blocks, detected from the dataflow alone."""
