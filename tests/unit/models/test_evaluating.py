"""A network computes in evaluation mode for a while, and is afterwards as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from speechdp.models.evaluating import evaluating


class Merging(nn.Linear):
    """Adds a correction to its weights while it evaluates, as adapters of low rank do."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.correction, self.is_merged = 1.0, False

    def train(self, mode: bool = True) -> Merging:
        super().train(mode)
        if self.is_merged == mode:
            with torch.no_grad():
                self.weight += -self.correction if mode else self.correction
            self.is_merged = not mode
        return self


@pytest.mark.parametrize("of_whole", [True, False])
@pytest.mark.parametrize("of_part", [True, False])
def test_every_part_has_its_mode_again_and_what_it_does_on_changing_it(of_whole: bool, of_part: bool) -> None:
    part = Merging()
    network = nn.Sequential(nn.Sequential(part, nn.Dropout()), Merging()).train(of_whole)
    part.train(of_part)
    modes = [each.training for each in network.modules()]
    weights = {name: value.clone() for name, value in network.state_dict().items()}
    with pytest.raises(KeyError), evaluating(network):
        assert not any(each.training for each in network.modules())
        raise KeyError
    assert [each.training for each in network.modules()] == modes
    for name, value in network.state_dict().items():
        torch.testing.assert_close(value, weights[name])
