"""The values that a captured function reads besides its arguments: globals, closures, constants,
settings.
"""
