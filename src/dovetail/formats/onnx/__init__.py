"""ATen to ONNX."""
