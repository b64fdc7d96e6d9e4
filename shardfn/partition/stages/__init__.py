"""Pipeline stages: the rank that runs each stage, and the messages between ranks."""
