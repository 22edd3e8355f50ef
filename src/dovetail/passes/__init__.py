"""Passes: functions from graph to graph, and what runs them."""
