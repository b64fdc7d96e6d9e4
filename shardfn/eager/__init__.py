"""DTensors and collectives of a script that runs as it is in a fake world, outside of functions."""
