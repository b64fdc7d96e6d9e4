"""Reports on a program (its collectives, memory, step time and costly placements), and the report
of `doctor` on the machine.
"""
