"""The registry of strategies: this folder itself."""

from speechdp.parallel.registry import parse_strategy, strategy_names

__all__ = ["parse_strategy", "strategy_names"]
