"""Sample inputs, tolerances and comparisons of results."""
