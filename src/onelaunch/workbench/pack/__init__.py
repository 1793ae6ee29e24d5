"""Packed studies: one file with a study and everything that it needs beside PyTorch, for a machine without a network.

``build.py`` writes the file, with the wheels that ``wheels.py`` gathers. ``script.py`` becomes its ``__main__.py``, and
``bring.py`` checks a result that comes back. The commands ``onelaunch study pack`` and ``import`` call them.
"""
