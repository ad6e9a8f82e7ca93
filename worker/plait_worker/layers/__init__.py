"""The parts that model families are made of, divided among the ranks."""
