"""The execution of torch.distributed programs, with each rank as a thread of one process."""
