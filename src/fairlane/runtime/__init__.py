"""What the processes of Fairlane share: their store, their session, their event-loop threads and their logs."""
