"""Tools for training besides the transforms: optimizers, mixed precision, clipping, averages,
placements of parameters, data loading and checkpoints.
"""
