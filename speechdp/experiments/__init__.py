"""Many runs for one answer: sweep, compare, profile."""
