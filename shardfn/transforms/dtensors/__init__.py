"""DTensors inside a captured function, in place of torch's own calls."""
