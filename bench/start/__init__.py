"""From the start of a process to the first result of a training step."""
