"""The capture of scan, cond, while_loop and custom derivatives."""
