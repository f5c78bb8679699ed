"""Communicators: how N equal ranks exchange tensors; `base.py` is the contract, one folder per back-end."""
