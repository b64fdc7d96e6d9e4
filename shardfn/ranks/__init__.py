"""The execution of unchanged torch.distributed programs, with each rank as a thread of one process.
"""
