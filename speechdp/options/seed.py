"""The range of seeds, the same for every command."""

from __future__ import annotations

from speechdp.errors import ConfigError

#: Upper bound of seeds, exclusive. numpy accepts none below 0, and torch gets a product of seeds (build.py).
SEED_LIMIT = 2**32


def check_seed(seed: int, option: str = "--seed") -> None:
    """Refuse a seed that some random generator does not accept.  Raises ConfigError."""
    if not 0 <= seed < SEED_LIMIT:
        raise ConfigError(f"{option} {seed}: must lie in 0..{SEED_LIMIT - 1}")
