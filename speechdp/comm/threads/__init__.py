"""Ranks as threads of one process: for tests, and the strictest of the back-ends."""
