"""Ends of a process: its output, its last lines, ends by signals."""
