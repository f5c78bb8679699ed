"""How the strategy of a run is given on the command line."""

from __future__ import annotations

import tyro

from speechdp.parallel.registry import StrategyChoice

#: How a strategy is read from the command line: as a text, which means something where it is used.
STRATEGY_TEXT = tyro.constructors.PrimitiveConstructorSpec(
    nargs=1,
    metavar="NAME",
    instance_from_str=lambda words: StrategyChoice(words[0]),
    is_instance=lambda value: isinstance(value, StrategyChoice),
    str_from_instance=lambda choice: [choice.text],
)
