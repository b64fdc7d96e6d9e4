"""The questions of a repeated call about its arguments, in C++ where the machine has a compiler."""
