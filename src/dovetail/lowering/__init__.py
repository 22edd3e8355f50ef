"""Lowering: regions to backends, with guards, fallbacks and a cache; compiled state beside the bodies."""
