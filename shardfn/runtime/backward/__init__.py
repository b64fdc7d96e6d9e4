"""Calls that torch's autograd records: the saved tensors, the op that autograd records, and the
backward.
"""
