"""Whole systems of real processes, observed from the outside: what was sent, what ran, what the store contains."""
