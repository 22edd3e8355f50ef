"""Compiled models: capture on demand, guards on the module, replay."""
