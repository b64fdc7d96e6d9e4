"""The price of a step under version control."""
