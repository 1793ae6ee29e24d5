"""``linear_rnn``: v = x @ weight, then the gated scan, in one launch, two or three."""

from onelaunch.ops.linear_rnn.contract import linear_rnn

from onelaunch.ops.linear_rnn import cost, probes, reference, typical, variants  # isort: skip  (register into linear_rnn)

__all__ = ["cost", "linear_rnn", "probes", "reference", "typical", "variants"]
