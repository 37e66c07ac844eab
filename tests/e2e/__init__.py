"""Whole systems of real processes, seen from the outside: what was sent, what ran, what the store says."""
