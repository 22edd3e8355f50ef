"""Graph in, graph out: passes, pipelines made of them, and the rewriting passes that come with the box."""
