"""Code for torch.distributed, judged against one device."""
