"""Private parts of torch.distributed."""
