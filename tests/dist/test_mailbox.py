"""Messages of any size reach every reader, in order, and nobody waits for a reader that is gone."""

import multiprocessing
import threading
from contextlib import suppress

import pytest
from support.leftovers import held
from support.ranks import shared_memory
from support.waiting import PATIENCE

from tritonllm.dist import mailbox as module
from tritonllm.dist.mailbox import Mailbox

MESSAGES = [b"x" * n for n in (1, 0, 5, 3 * module.SLOT + 7, module.SLOT, 12, 2 * module.SLOT)]


class NothingMore(Exception):
    """A reader waits for a piece although all are written: it has lost some."""


def read_all(box, reader, count, found, written):
    """All messages, into ``found``.

    Args:
        written: an event, of the writer's end.
    """
    ended = False

    def check():
        nonlocal ended
        if ended:  # and nothing has come since
            raise NothingMore
        ended = written.is_set()

    with suppress(NothingMore):
        for _ in range(count):
            ended = False
            found[reader].append(box.receive(reader, check))


def exchange(box, messages):
    """What each reader gets of all messages. Ends also where some are lost on their way, or read as others."""
    found, written = [[] for _ in range(box.readers)], threading.Event()
    arguments = [(box, reader, len(messages), found, written) for reader in range(box.readers)]
    threads = [threading.Thread(target=read_all, args=each, daemon=True) for each in arguments]
    asked = threading.Event()

    def check():
        if not asked.is_set():  # all places are taken
            asked.set()
            for thread in threads:
                thread.start()
        assert all(thread.is_alive() for thread in threads), "a reader has ended before the writer"

    try:
        for message in messages:
            box.send(message, check)
    finally:
        written.set()
        for thread in threads:
            if not asked.is_set():  # the writer has not waited
                thread.start()
            thread.join(PATIENCE)
    return found


@pytest.mark.parametrize("readers", [1, 3])
def test_all_readers_get_all_messages(readers):
    """Also those longer than all slots together."""
    box = Mailbox(readers)
    messages = [*MESSAGES, b"y" * (module.SLOTS + 2) * module.SLOT, b"end"]
    assert exchange(box, messages) == [messages] * readers
    assert box.sent == len(messages)


@pytest.mark.parametrize("readers", [1, 2])
def test_no_slot_is_written_again_before_all_have_read_it(readers):
    """The writer has taken all places when the first of them is read."""
    pieces = [bytes([number]) * module.SLOT for number in range(module.SLOTS + 3)]
    for messages in ([b"".join(pieces)], pieces):
        assert exchange(Mailbox(readers), messages) == [messages] * readers


def answer(box, pipe):
    pipe.send([len(box.receive(0)) for _ in range(3)])
    box.beat(0)
    box.acted(0)


def test_another_process_reads():
    spawn = multiprocessing.get_context("spawn")
    box, (mine, theirs) = Mailbox(1), spawn.Pipe()
    process = spawn.Process(target=answer, args=(box, theirs))
    process.start()
    for size in (3, module.SLOT + 1, 9):
        box.send(b"z" * size)
    assert mine.recv() == [3, module.SLOT + 1, 9]
    process.join(PATIENCE)
    assert (process.exitcode, box.beats(0), box.acts(0)) == (0, 1, 1)


def test_a_full_mailbox_asks_whether_anybody_reads():
    box, asked = Mailbox(2), []

    def check():
        asked.append(box.sent)
        if len(asked) == 3:
            raise TimeoutError

    for _ in range(module.SLOTS):
        box.send(b"x", check)
    assert asked == []
    for _ in range(module.SLOTS):
        box.receive(0)
    with pytest.raises(TimeoutError):  # the other reader has read nothing
        box.send(b"x", check)
    assert asked == [module.SLOTS] * 3


def test_a_reader_asks_whether_anybody_writes():
    def check():
        raise EOFError

    with pytest.raises(EOFError):
        Mailbox(1).receive(0, check)


def test_the_memory_has_no_name():
    before = shared_memory()
    box = Mailbox(1)
    box.send(b"x")
    assert shared_memory() <= before


def test_the_memory_goes_with_the_mailbox():
    before = held()
    Mailbox(1).send(b"x")
    assert not held() - before
