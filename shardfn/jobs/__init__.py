"""The processes of a distributed job: their connection, and their reports of failures."""
