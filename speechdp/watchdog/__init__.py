"""Hung jobs: what each rank is doing, who is late, and ending them."""
