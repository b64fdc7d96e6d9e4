"""Inductor's C++ kernels: how they are joined, compiled once a machine, and kept."""
