"""Inductor's C++ kernels, which shardfn joins, compiles once per machine, and stores."""
