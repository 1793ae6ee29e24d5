"""Tests of ``onelaunch study show``: what it says of a declaration before anything runs.

The fixtures ``call`` and ``here`` are those of ``conftest.py``; ``STUDY`` is the study file in ``here``.
"""

from __future__ import annotations

from tests.cli.conftest import STUDY


def test_a_shape_is_left_out_of_directions_that_it_does_not_have(call, here):
    both = STUDY.replace("rounds = 3", 'rounds = 3\ndirections = ["forward", "forward_backward"]')
    both = both.replace('of = "parallel"', 'of = "parallel"\nat = "first"')
    sizes = 'scale = "small"\ndtype = "float32"\nB = 2\nT = 40\nV = 8\n'
    second = f'[[shapes]]\nname = "second"\ndirections = ["forward_backward"]\n{sizes}'
    (here / "studies" / "toy-study.toml").write_text(f"{both}\n{second}")
    answer = call("study", "show", "toy-study", "--at", "second")
    assert answer.code == 0, answer.err
    assert (answer.out.count("T=24"), answer.out.count("T=40")) == (2, 1), "a row for each direction of a shape"
    assert answer.out.count("At second") == 1


def test_show_lists_predictions_and_says_which_criterion_is_vacuous(call, here):
    vacuous = '[[criteria]]\nname = "itself"\nmeasure = "time_ratio"\nof = "parallel"\nover = "parallel"\nat_most = 1.1\n'
    expected = '[[predictions]]\nby = "a colleague"\nmeasure = "speedup"\nof = "parallel"\nvalue = 12\nwhy = "One pass."\n'
    (here / "studies" / "toy-study.toml").write_text(f"{STUDY}\n{vacuous}\n{expected}")
    answer = call("study", "show", "toy-study")
    assert answer.code == 0
    assert "itself vacuous" in answer.out
    assert "it compares parallel with itself" in answer.out
    assert "parallel is 12.0x as fast as eager (forward, cold) a colleague One pass." in answer.out
