"""What training runs need beside the transforms: optimizers, precision, clipping and averages,
placements of all parameters, batches, checkpoints.
"""
