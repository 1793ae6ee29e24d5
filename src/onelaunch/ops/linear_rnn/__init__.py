"""``linear_rnn``: v = x @ weight, then the gated scan, in one launch, two, three or many."""

from onelaunch.ops.linear_rnn.contract import linear_rnn

from onelaunch.ops.linear_rnn import cost, fla, reference, torch_variants, triton_variants, hopper  # isort: skip  (register into linear_rnn)

__all__ = ["cost", "fla", "hopper", "linear_rnn", "reference", "torch_variants", "triton_variants"]
