"""Pictures of DTensors, tables, programs, schedules, memory, time and bytes."""
