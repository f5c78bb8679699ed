"""Runs first in every process of a job under test: Python imports it at start."""

import os

if os.environ.get("SPEECHDP_TEST_FORK_ADDRESS"):
    from tests.helpers.startup.handing_over import hand_over

    hand_over(os.environ["SPEECHDP_TEST_FORK_ADDRESS"])
if "SPEECHDP_TEST_GATES" in os.environ:
    from tests.helpers.startup.gated import put_gates_up

    put_gates_up()
