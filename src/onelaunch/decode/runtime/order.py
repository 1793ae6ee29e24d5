"""Order of the work of several CUDA streams on memory that they share.

Sessions, captured steps and packed weights each have such memory, and a lock under which work on it is enqueued.
"""

from __future__ import annotations

import torch


class StreamOrder:
    """Order of the work of several CUDA streams on the same device memory.

    Args:
        device: Device of the memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: torch.cuda.Stream | None = None

    def join(self) -> None:
        """Make later work on the current stream wait for the work of the stream that joined before.

        The caller holds a lock until its work is enqueued. Nothing happens while the current stream is captured into a graph,
        since the graph may be replayed on another stream.
        """
        if self._device.type != "cuda":
            return
        current = torch.cuda.current_stream(self._device)
        with torch.cuda.device(self._device):
            if torch.cuda.is_current_stream_capturing():
                return
        if self._last is not None and self._last != current:
            current.wait_stream(self._last)
        self._last = current
