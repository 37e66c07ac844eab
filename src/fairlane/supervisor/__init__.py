"""Several worker processes under one that watches them: what one of them dies with is known at once."""
