"""Context parallelism: sequences whose steps are spread over the processes of a ``torch.distributed`` group.

Users pass ``mesh`` to ``gated_scan``, ``linear_rnn``, ``gla`` and the layers of ``onelaunch.nn``, or make a :class:`Context`
once by :func:`context`. An operation derives a class from :class:`Rules`, which computes how a slice of the sequence changes the
state. :func:`run_across_ranks` exchanges these changes between ranks and scans them.
"""

from onelaunch.parallel.collectives import InPlace, Outbox, Outgoing, Pending
from onelaunch.parallel.contexts import Context, Described, context, entered, offsets_of
from onelaunch.parallel.halo import Halo, start_halo, tied
from onelaunch.parallel.rules import Kept, Passes, Rules, Tensors, shifted
from onelaunch.parallel.state_scan import run_across_ranks

__all__ = [
    "Context",
    "Described",
    "Halo",
    "InPlace",
    "Kept",
    "Outbox",
    "Outgoing",
    "Passes",
    "Pending",
    "Rules",
    "Tensors",
    "context",
    "entered",
    "offsets_of",
    "run_across_ranks",
    "shifted",
    "start_halo",
    "tied",
]
