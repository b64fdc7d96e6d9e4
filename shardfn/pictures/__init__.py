"""Pictures of values of the core: DTensors, tables, programs, schedules, memory, time, bytes."""
