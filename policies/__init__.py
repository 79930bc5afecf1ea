"""Whose sequence comes next: levels, shares, budgets. Pure: no I/O, no clock, no randomness."""
