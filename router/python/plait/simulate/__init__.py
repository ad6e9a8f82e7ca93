"""`plait simulate`: the scheduler that serves, on a trace, in virtual time."""
