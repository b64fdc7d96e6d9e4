"""Fast argument checks of repeated calls, in C++ if the machine has a compiler."""
