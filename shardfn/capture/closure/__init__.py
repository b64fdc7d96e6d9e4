"""A function's reads outside of its arguments: globals, closures, constants, settings."""
