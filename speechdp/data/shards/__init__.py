"""HDF5 shards and data directories: their layout, writing them, reading them without trusting them."""
