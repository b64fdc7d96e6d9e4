"""The schedule passes, each of which takes the graph of one rank and returns a new graph."""
