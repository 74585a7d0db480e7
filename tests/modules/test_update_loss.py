"""Settings of the update's loss."""

from __future__ import annotations

import pytest

from ragen_pl.modules.losses import UpdateLoss


def test_entropy_bonus_is_zero_at_its_target() -> None:
    loss = UpdateLoss(entropy_coefficient=0.1, entropy_target=2.0)
    assert loss.entropy_weight(0.0) == pytest.approx(0.1)
    assert loss.entropy_weight(1.0) == pytest.approx(0.05)
    assert loss.entropy_weight(3.0) == 0.0
    assert UpdateLoss(entropy_coefficient=0.1).entropy_weight(9.0) == 0.1
