"""The comparison of two runs of one step, value by value, and the inspection of the values of all
ranks at each op.
"""
