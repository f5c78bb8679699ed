"""What a process owes its user however it ends: its output, its last lines, ends by signals."""
