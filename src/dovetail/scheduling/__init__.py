"""Finding, fusing and replacing parts of a model, step by step."""
