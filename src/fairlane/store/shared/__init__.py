"""Code that several stores share: rows, connections, deadlines and wake-ups."""
