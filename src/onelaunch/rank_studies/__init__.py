"""Studies of calls whose steps are spread over several GPUs, against the same call on one of them.

A study of ranks is declared in ``studies/ranks/NAME.toml`` (``declare.py``). ``run.py`` measures it in the processes of torchrun.
A result (``result.py``) holds declaration, provenance, measurements and judged criteria (``judge.py``), and grows by the runs on
other numbers of ranks. ``onelaunch study ranks`` runs a study (``ranks.py``).
"""
