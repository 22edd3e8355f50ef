"""Sibling products found, what follows them lifted, and both written as one."""
