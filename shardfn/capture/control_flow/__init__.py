"""scan, cond, while_loop and custom derivatives while a function is captured."""
