"""Checks of training steps: audits of torch.distributed code, comparisons of two layouts, locks of
the cost of a step, and tests over many meshes.
"""
