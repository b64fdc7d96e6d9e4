"""CUDA on a machine without a GPU: programs are captured and lowered for it, and not run."""
