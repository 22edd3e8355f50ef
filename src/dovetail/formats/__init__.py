"""Files and exchange formats: archives, exported programs, ONNX, StableHLO, artifacts of one region."""
