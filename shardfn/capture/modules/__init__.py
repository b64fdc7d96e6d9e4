"""The capture of nn.Module calls: copies of modules that a pure call may change, and hooks as
identity functions with a custom derivative.
"""
