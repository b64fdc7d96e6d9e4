"""The assignment of gradient reductions to buckets."""
