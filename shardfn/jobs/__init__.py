"""The processes of a distributed job: how they connect, and how they report failures to each other.
"""
