"""Bodies of regions as ONNX: what each ATen operator is there, and a writer of graphs and functions."""
