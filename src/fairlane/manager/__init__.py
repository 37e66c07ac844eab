"""The manager: the elected leader runs the services that promote, rescue, admit, schedule and prune jobs."""
