"""Random FX programs, what outlining must keep of them, and the runs that look for a counterexample."""
