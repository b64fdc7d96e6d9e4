"""The reports of a program: its collectives, memory, step time and costly placements; and of the
machine (doctor).
"""
