"""A dump of what dovetail does to many models and programs, to tell whether a change of its source changed any of it."""
