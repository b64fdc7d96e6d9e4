"""What a sharding rule is: its input, its strategies, einsum notation, the registry of users."""
