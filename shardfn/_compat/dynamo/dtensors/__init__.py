"""DTensors that Dynamo meets in a captured function."""
