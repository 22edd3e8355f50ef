"""Linear layers and convolutions in 8-bit integers."""
