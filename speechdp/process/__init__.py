"""How a process ends: its output, its last messages, ends by signals."""
