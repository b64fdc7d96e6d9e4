"""Inductor's C++ kernels: how shardfn joins them, compiles them once per machine, and stores them.
"""
