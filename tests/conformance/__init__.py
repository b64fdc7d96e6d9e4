"""Every operator of torch's own database, sharded in every way, compared with the plain
operator.
"""
