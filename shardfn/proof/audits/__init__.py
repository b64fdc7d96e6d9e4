"""Audits, which compare code for torch.distributed with the same step on one device."""
