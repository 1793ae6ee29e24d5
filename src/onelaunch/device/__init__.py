"""Facts about devices, their measured peaks, and the tools that are installed."""
