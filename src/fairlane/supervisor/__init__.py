"""A supervisor that runs several worker processes and recovers the jobs of one that dies at once."""
