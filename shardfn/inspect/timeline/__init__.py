"""The timeline of a predicted step, as events that show what each rank does at which time."""
