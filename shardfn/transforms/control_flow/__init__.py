"""Loops and branches, of shardfn and of torch, as one op of the captured program."""
