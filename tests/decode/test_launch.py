"""What is kept for a model: repacked weights hold as long as nobody writes to the weights."""

from __future__ import annotations

import pytest

from onelaunch.decode import launch, random_weights
from tests.decode.models import SMALL


@pytest.mark.parametrize("name", ["embed_tokens", "layers.1.q_norm", "norm"])
def test_what_was_made_of_weights_is_made_anew_once_they_are_written_to(name):
    weights = random_weights(SMALL, 0, "cpu")
    made = launch._made(weights)
    assert launch._made(weights) is made
    weights.tensors()[name].mul_(2)
    again = launch._made(weights)
    assert again is not made
    assert launch._made(weights) is again


def test_other_weights_have_their_own():
    assert launch._made(random_weights(SMALL, 0, "cpu")) is not launch._made(random_weights(SMALL, 0, "cpu"))
