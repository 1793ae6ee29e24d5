"""Choose the variant that runs a call, explain the choice, and check a variant's results."""

from onelaunch.dispatch.choice import CONFIRMED, TIE, choose, era, forget, pick, run, why_not_faster
from onelaunch.dispatch.explanation import Explanation, Faster, Standing, explain
from onelaunch.dispatch.results import check_results
from onelaunch.dispatch.symbolic import decided, note_sizes, within
from onelaunch.operation import AUTO

__all__ = [
    "AUTO",
    "CONFIRMED",
    "TIE",
    "Explanation",
    "Faster",
    "Standing",
    "check_results",
    "choose",
    "decided",
    "era",
    "explain",
    "forget",
    "note_sizes",
    "pick",
    "run",
    "why_not_faster",
    "within",
]
