"""Sinks: places outside of onelaunch that keep the results of runs, such as Weights & Biases, TensorBoard and MLflow.

``onelaunch study run`` and ``report`` make sinks from their option ``--log`` by :func:`make_sink`. :func:`deliver` sends them a
result that is stored already, so that a sink that fails loses nothing. A package of yours may add one with :func:`register_sink`.
"""

from onelaunch.workbench.sinks.delivery import deliver, make_sink, register_sink, sink_names
from onelaunch.workbench.sinks.record import Record, record_of
from onelaunch.workbench.sinks.sink import Sink, SinkNotice

__all__ = ["Record", "Sink", "SinkNotice", "deliver", "make_sink", "record_of", "register_sink", "sink_names"]
