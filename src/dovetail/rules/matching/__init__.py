"""How a pattern is found: traced, searched for, and proven on the operands it was found with."""
