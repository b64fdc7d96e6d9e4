"""The laws on one GPU: `python -m bench.gpu.check`."""
