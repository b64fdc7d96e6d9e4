"""Calls that autograd follows: the tensors, the op that autograd sees, the second half."""
