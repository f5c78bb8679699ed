"""Communicators: how N equal ranks exchange tensors; `base.py` is the contract, a folder each back-end."""
