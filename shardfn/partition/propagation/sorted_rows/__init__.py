"""Rows that a program sorts and puts back: each rank sorts its own."""
