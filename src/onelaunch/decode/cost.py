"""What ``decode_step`` must compute and move."""

from __future__ import annotations

import math

from onelaunch.decode.contract import decode_step
from onelaunch.decode.reference import config_of
from onelaunch.decode.weights import parts
from onelaunch.operation import Case, Cost, Direction, Variant


@decode_step.costs
def cost(case: Case, variant: Variant | None, direction: Direction) -> Cost:
    """The least: every weight but the rows of an untied embedding that are not looked up, the cached rows, the new ones, logits.

    Activations stay on the chip. A variant adds nothing: what its launches hand on are vectors, a thousandth of the weights.
    """
    del direction  # there is no backward pass
    config, position = config_of(case), case.sizes["position"]
    shapes = {name: shape for name, _, shape in parts(config)}
    elements = sum(math.prod(shape) for shape in shapes.values())
    multiplied = sum(math.prod(shape) for shape in shapes.values() if len(shape) == 2)
    if not config.tie_word_embeddings:
        embedding = math.prod(shapes["embed_tokens"])
        elements += config.hidden_size - embedding
        multiplied -= embedding
    row = 2 * config.num_hidden_layers * config.key_value_size  # keys and values of a position
    moved = (elements + (position + 1) * row) * case.dtype.itemsize + 4 * config.vocab_size
    written = row * case.dtype.itemsize + 4 * config.vocab_size
    attention = 2 * config.num_hidden_layers * config.query_size * (position + 1)
    launches = 1 if variant is None else variant.tags.get("launches")
    return Cost(2 * (multiplied + attention), moved, launches, written=written)
