"""A thread that loads weights keeps to itself, and the others keep their threads."""

import threading

import torch

from hiddentap.models.streaming.one_thread import in_one_thread


def threads_of_a_new_thread(spread: bool) -> int:
    """How many threads torch has in a thread that is new, inside `in_one_thread` or not."""
    found = []

    def look() -> None:
        if spread:
            found.append(torch.get_num_threads())
            return
        with in_one_thread():
            torch.stack([torch.zeros(1 << 17)] * 4)
            found.append(torch.get_num_threads())

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return found[0]


def test_the_thread_has_one_and_all_others_what_they_had() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert threads_of_a_new_thread(spread=False) == 1
        assert torch.get_num_threads() == 3
        assert threads_of_a_new_thread(spread=True) == 3
    finally:
        torch.set_num_threads(before)


def test_the_calling_thread_has_its_own_again_after_the_block() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with in_one_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
