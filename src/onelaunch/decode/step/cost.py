"""Cost of ``decode_step``: the floating-point operations and the memory traffic that every variant needs.

The workbench plans studies with it and computes roofline bounds from it.
"""

from __future__ import annotations

from onelaunch.decode.model.weights import elements
from onelaunch.decode.step.contract import decode_step
from onelaunch.decode.step.reference import config_of
from onelaunch.operation import Case, Cost, Direction, Variant


@decode_step.costs
def cost(case: Case, variant: Variant | None, direction: Direction) -> Cost:
    """Return the least cost of a step, with the launches of a variant; for ``None``, of the best conceivable one.

    The bytes are those of every weight, of the cached rows, of the new rows and of the logits. Of an untied embedding, only the
    row that is looked up counts. Activations count as staying on chip. A variant adds no bytes: the vectors that its launches
    exchange through memory are a thousandth of the weights. The operations are two per multiply-add, in the matrix-vector
    products and in attention over ``position + 1`` positions.
    """
    del direction  # there is no backward pass
    config, position = config_of(case), case.sizes["position"]
    read, multiplied = elements(config), elements(config, matrices_only=True)
    if not config.tie_word_embeddings:
        embedding = config.vocab_size * config.hidden_size
        read += config.hidden_size - embedding
        multiplied -= embedding
    row = 2 * config.num_hidden_layers * config.key_value_size  # keys and values of a position
    moved = (read + (position + 1) * row) * case.dtype.itemsize + 4 * config.vocab_size
    written = row * case.dtype.itemsize + 4 * config.vocab_size
    # Multiply-adds of the scores and of the weighted sum of values.
    attention = 2 * config.num_hidden_layers * config.query_size * (position + 1)
    launches = 1 if variant is None else variant.launches
    return Cost(2 * (multiplied + attention), moved, launches, written=written)
