"""Which frames which rank trains on, in which step: pure functions of the index and the seed."""
