"""What several stores have in common: rows, connections, deadlines and wake-ups."""
