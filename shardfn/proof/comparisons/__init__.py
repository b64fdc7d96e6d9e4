"""Two runs of one step, value by value; the values of all ranks at each op."""
