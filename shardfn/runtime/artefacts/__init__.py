"""Artefacts: compiled programs in safetensors files, which run without the source code."""
