"""What a function reads besides its arguments: globals, closures, constants, settings."""
