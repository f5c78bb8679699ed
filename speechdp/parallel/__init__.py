"""The core: a replica in flat vectors, the base class of strategies, averaging periods, the registry."""
