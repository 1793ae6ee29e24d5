"""Device facts, chip architectures, measured peaks, and the tools that are installed on this machine."""
