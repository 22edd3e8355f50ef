"""Schedules: a model changed step by step, each step checked and undoable."""
