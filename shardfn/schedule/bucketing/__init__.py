"""Which gradient reductions travel in which bucket."""
