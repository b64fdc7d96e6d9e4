"""Pipeline stages: which rank of the pipeline axis runs which step, and the messages between ranks.
"""
