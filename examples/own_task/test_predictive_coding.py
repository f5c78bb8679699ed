"""The task keeps to what training relies on."""

import predictive_coding

from speechdp import task
from speechdp.testing import task_contract

task("predictive_coding")(predictive_coding.PredictiveCoding)  # not needed where the package is installed


def test_contract():
    task_contract("predictive_coding:ahead=2,width=16")
