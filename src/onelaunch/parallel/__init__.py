"""Context parallelism: sequences whose steps are spread over the processes of a ``torch.distributed`` group.

Users pass ``mesh`` to ``gated_scan``, ``linear_rnn``, ``gla`` and the layers of ``onelaunch.nn``, or make a :class:`Context`
once by :func:`context`. The operations say by :class:`Rules` how a slice of the sequence changes the state; :func:`across` does
the rest.
"""

from onelaunch.parallel.carry import across
from onelaunch.parallel.contexts import Context, Described, context, entered, offsets_of
from onelaunch.parallel.halo import Halo, start_halo, tied
from onelaunch.parallel.rules import Kept, Passes, Rules, Tensors, shifted

__all__ = [
    "Context",
    "Described",
    "Halo",
    "Kept",
    "Passes",
    "Rules",
    "Tensors",
    "across",
    "context",
    "entered",
    "offsets_of",
    "shifted",
    "start_halo",
    "tied",
]
