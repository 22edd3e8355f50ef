"""The graph itself: FX graphs, their operators, effects, aliases, hashes, printing and verification."""
