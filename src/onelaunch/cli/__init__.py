"""Command line, with one module for each command."""
