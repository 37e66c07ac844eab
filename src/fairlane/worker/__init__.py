"""The worker: claims jobs for its free slots, runs them, and writes their results."""
