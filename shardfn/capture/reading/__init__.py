"""From a function that Dynamo has read to a graph of ATen ops, for any sizes of its inputs."""
