"""What planning a program at once takes, and what it spares."""
