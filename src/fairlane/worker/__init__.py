"""The worker: claims jobs for its free slots, runs their bodies, writes down how they ended."""
