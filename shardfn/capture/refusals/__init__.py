"""Why a function cannot be captured, in words: what is wrong, where, and what to write instead."""
