"""The command ``demo``: a story played by real workers on a temporary store."""
