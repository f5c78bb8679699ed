"""The range of seeds, the same for every command."""

from __future__ import annotations

from speechdp.errors import ConfigError

#: Seeds lie below this: numpy takes none below 0, and what torch is given is a product of them (build.py).
SEED_LIMIT = 2**32


def check_seed(seed: int, option: str = "--seed") -> None:
    """Refuse a seed that not every generator takes.  Raises ConfigError."""
    if not 0 <= seed < SEED_LIMIT:
        raise ConfigError(f"{option} {seed}: must lie in 0..{SEED_LIMIT - 1}")
