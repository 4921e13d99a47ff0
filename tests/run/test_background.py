"""The thread behind the forward."""

import threading
import time

import pytest

from hiddentap.capture.run.background import Background


def test_jobs_are_done_in_order_by_the_end_of_the_block() -> None:
    done: list[int] = []
    with Background(2) as background:
        for i in range(20):
            background.submit(lambda i=i: done.append(i))
    assert done == list(range(20))


def test_a_slow_job_holds_the_caller_back_instead_of_piling_jobs_up() -> None:
    free, waiting, most = threading.Event(), 0, 0
    lock = threading.Lock()

    def job() -> None:
        nonlocal waiting
        free.wait(5)
        with lock:
            waiting -= 1

    def submit_all(background: Background) -> None:
        nonlocal waiting, most
        for _ in range(8):
            with lock:
                waiting += 1
                most = max(most, waiting)
            background.submit(job)

    with Background(2) as background:
        caller = threading.Thread(target=submit_all, args=(background,))
        caller.start()
        time.sleep(0.2)
        assert caller.is_alive()
        # One job in work, two in the queue, one that the caller holds.
        assert most == 4
        free.set()
        caller.join()


def test_the_first_error_is_raised_by_a_later_submit_and_later_jobs_are_dropped() -> None:
    done: list[str] = []

    def failing() -> None:
        raise ZeroDivisionError("in the thread")

    def submit_fifty_more() -> None:
        with Background(1) as background:
            background.submit(failing)
            for _ in range(50):
                background.submit(lambda: done.append("late"))
                time.sleep(0.01)

    with pytest.raises(ZeroDivisionError, match="in the thread"):
        submit_fifty_more()
    assert done == []


def test_an_error_of_the_last_job_is_raised_on_leaving() -> None:
    with pytest.raises(ZeroDivisionError), Background(1) as background:
        background.submit(lambda: 1 / 0)


def test_jobs_already_given_are_done_where_the_block_fails() -> None:
    done: list[int] = []

    def interrupted() -> None:
        with Background(4) as background:
            background.submit(lambda: (time.sleep(0.1), done.append(1)))
            background.submit(lambda: done.append(2))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert done == [1, 2]
    assert threading.active_count() == 1 or not any(t.name == "hiddentap-background" for t in threading.enumerate())
