"""Lock files, which keep the cost of a step under version control."""
