"""Uses of Dynamo: how it traces Python code, which functions it calls untraced, and which values it
reads besides the arguments.
"""
