"""The command ``demo``: a guided tour with real workers on a temporary store."""
