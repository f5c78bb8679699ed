"""`speechdp compare`: which runs, starting them, and how far they have come."""
