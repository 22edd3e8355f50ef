"""Compilers of other projects as backends."""
