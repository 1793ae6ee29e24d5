"""Kernel launches as objects, and what is derived from them: PyTorch operators, fake results and builds for inspection."""
