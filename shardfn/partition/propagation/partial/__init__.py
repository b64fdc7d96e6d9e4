"""Values that stay Partial: means, sums of several terms, and gradients that are cast."""
