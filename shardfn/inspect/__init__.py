"""Reports on plans, schedules and the machine."""
