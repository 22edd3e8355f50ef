"""Reports: what was fused, what was not and why, as a page to look at."""
