"""Studies of whole models: training steps, inference and training runs before and after ``onelaunch.accelerate``.

A study of models is declared in ``studies/models/NAME.toml`` (``declare.py``). Its tasks (``tasks.py``, ``training.py``) measure
one thing each, in a process of its own (``child.py``), and ``run.py`` carries out those that a result does not have yet. A result
(``result.py``) holds declaration, provenance, measurements and judged criteria (``judge.py``), like that of a study of variants;
``report.py`` shows it. Command ``onelaunch study models`` runs a study.
"""
