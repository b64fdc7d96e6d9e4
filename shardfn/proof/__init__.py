"""Proof: of code for torch.distributed that is not ours, of two layouts, of a step's price."""
