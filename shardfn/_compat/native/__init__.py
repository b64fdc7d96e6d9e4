"""What a repeated call asks of its arguments: in C++ where the machine has a compiler."""
