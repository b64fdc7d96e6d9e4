"""Dynamo: how it reads Python, what it runs as it is, and what it has read beside the arguments."""
