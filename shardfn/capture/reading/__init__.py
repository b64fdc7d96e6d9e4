"""The conversion of a function that Dynamo has traced into a graph of ATen ops, with symbolic input
sizes.
"""
