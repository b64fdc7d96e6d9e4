"""Calls of nn.Module: copies that a pure call may change, and hooks as identities with a
derivative.
"""
