"""Uses of private parts of torch.distributed."""
