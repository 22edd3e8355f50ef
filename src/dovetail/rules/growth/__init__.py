"""How regions grow operation by operation: what each one does, and what may join it."""
