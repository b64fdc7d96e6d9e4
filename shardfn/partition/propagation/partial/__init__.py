"""Values that stay Partial: means, sums of several terms, gradients that are cast."""
