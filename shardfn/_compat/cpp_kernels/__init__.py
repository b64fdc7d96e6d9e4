"""Inductor's C++ kernels: many in one translation unit, each compiled once on a machine."""
