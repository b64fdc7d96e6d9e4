"""Calls of nn.Module: copies that a pure call may change, and hooks as identity functions with
a derivative.
"""
