"""Archives of fused graphs: save and load without pickle."""
