"""The choice of placements for all ops of a program, by one integer program for each mesh axis."""
