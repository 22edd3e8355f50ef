"""The steps from a model to a graph; `dovetail.graph.capture` puts them in order."""
