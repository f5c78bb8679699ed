"""The strategy keeps to what training relies on."""

import growing_averaging

from speechdp import strategy
from speechdp.testing import strategy_contract

strategy("growing_averaging")(growing_averaging.GrowingAveraging)  # not needed where the package is installed


def test_contract():
    strategy_contract("growing_averaging:period=2,stay=1,longest=8")
