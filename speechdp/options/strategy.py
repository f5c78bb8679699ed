"""How to give the strategy of a run on the command line."""

from __future__ import annotations

import tyro

from speechdp.parallel.registry import StrategyChoice

#: Parser of a strategy on the command line. It keeps the text; the code that uses the strategy parses it.
STRATEGY_TEXT = tyro.constructors.PrimitiveConstructorSpec(
    nargs=1,
    metavar="NAME",
    instance_from_str=lambda words: StrategyChoice(words[0]),
    is_instance=lambda value: isinstance(value, StrategyChoice),
    str_from_instance=lambda choice: [choice.text],
)
