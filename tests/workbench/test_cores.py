"""Tests that all threads of a process share one core while calls from Python are timed, and get their cores back."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest

from onelaunch.workbench.measure.cores import give_way, one_core

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs Linux and two cores"
)


@pytest.fixture
def others() -> Iterator[list[int]]:
    """Yield the system's numbers of two threads that wait; the second one may run on one core only."""
    ready, end, numbers = threading.Barrier(3), threading.Event(), []

    def wait(alone: bool) -> None:
        if alone:
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        numbers.append(threading.get_native_id())
        ready.wait(10)
        end.wait(60)

    threads = [threading.Thread(target=wait, args=(alone,)) for alone in (False, True)]
    for each in threads:
        each.start()
    ready.wait(10)
    yield numbers
    end.set()
    for each in threads:
        each.join()


def test_all_threads_share_one_core_inside_and_get_theirs_back(others):
    threads = [0, *others]
    before = [os.sched_getaffinity(each) for each in threads]
    assert len(before[0]) > 1
    with one_core():
        inside = [os.sched_getaffinity(each) for each in threads]
    (core,) = inside[0]
    assert core in before[0]
    assert inside == [{core}] * 3
    assert [os.sched_getaffinity(each) for each in threads] == before


def _niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, 0)


def test_processes_that_compile_give_way_to_others():
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"), initializer=give_way) as pool:
        assert pool.submit(_niceness).result() == min(_niceness() + 10, 19)


def test_a_thread_that_starts_inside_gets_all_cores_and_an_error_changes_nothing():
    before, end = os.sched_getaffinity(0), threading.Event()
    started = threading.Thread(target=end.wait, args=(60,))

    def fail() -> None:
        with one_core():
            started.start()
            raise RuntimeError("a call failed")

    with pytest.raises(RuntimeError, match="a call failed"):
        fail()
    assert started.native_id is not None
    found = os.sched_getaffinity(started.native_id)
    end.set()
    started.join()
    assert found == os.sched_getaffinity(0) == before
