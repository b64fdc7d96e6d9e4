"""Programs of torch.distributed, run as they are: each rank is a thread of this process."""
