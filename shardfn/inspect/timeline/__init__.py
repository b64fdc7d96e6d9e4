"""The timeline of a predicted step: what each rank does when, as events."""
