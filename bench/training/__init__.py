"""Training: what strategies send, and whole steps next to DDP and FSDP2."""
