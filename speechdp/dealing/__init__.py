"""Batches dealt to asynchronous ranks as they ask for them."""
