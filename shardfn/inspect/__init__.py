"""Looking at things: what this machine can do."""
