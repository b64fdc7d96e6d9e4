"""Artefacts: a compiled program as one file of safetensors, which is run without the source."""
