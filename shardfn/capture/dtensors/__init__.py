"""DTensors inside a captured function: global tensors whose placements capture knows."""
