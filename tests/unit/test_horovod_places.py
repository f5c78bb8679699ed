"""Where Horovod's ranks stand on their hosts, for any order in which mpirun places them."""

from __future__ import annotations

import pytest

pytest.importorskip("horovod", reason="Horovod is not installed; launch/setup builds it")

from speechdp.comm.horovod_gloo import _Place, _places


def test_two_hosts_filled_one_after_the_other() -> None:
    assert _places(["a", "a", "b"]) == [_Place(0, 2, 0, 2), _Place(1, 2, 0, 1), _Place(0, 1, 1, 2)]


def test_hosts_in_turn() -> None:
    assert _places(["a", "b", "a", "b"]) == [
        _Place(0, 2, 0, 2),
        _Place(0, 2, 1, 2),
        _Place(1, 2, 0, 2),
        _Place(1, 2, 1, 2),
    ]
