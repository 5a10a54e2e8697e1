"""Steps by broadcast: a rank takes what rank 0 has sent, in its order and once, and nothing else."""

from contextlib import suppress

import pytest
import torch
from support.ranks import run_ranks

from tritonllm import env
from tritonllm.dist.door import IntruderError, new_secret
from tritonllm.engine.ranks.launched import _HEAD, Wire

KEY = new_secret()
MESSAGES = [b"a step", b"x" * 100_000, b"another step", b""]


def both(send, receive):
    """What rank 1 makes of what rank 0 does with the group that joins them."""
    return run_ranks(2, lambda group: receive(group) if group.rank else send(group))[1]


def refused(send):
    """``send`` gets the group, and what it broadcasts of a step that it sends as rank 0 does."""

    def sends(group):
        said = []
        broadcast = group.broadcast
        group.broadcast = lambda x: (said.append(x.clone()), x)[1]
        Wire(group, KEY).send(b"a step")
        group.broadcast = broadcast
        with suppress(RuntimeError):  # the other one has left
            send(group, *said)

    def receives(group):
        wire = Wire(group, KEY)
        taken = []
        with pytest.raises(IntruderError, match="what came as a step is not what rank 0 sent"):
            while True:
                taken.append(bytes(wire.receive()))
        return taken

    return both(sends, receives)


def test_messages_come_as_they_were_sent():
    def send(group):
        wire = Wire(group, KEY)
        for message in MESSAGES:
            wire.send(message)

    def receive(group):
        wire = Wire(group, KEY)
        return [bytes(wire.receive()) for _ in MESSAGES]

    assert both(send, receive) == MESSAGES


def test_a_step_of_a_stranger_is_refused():
    assert refused(lambda group, head, body: Wire(group, new_secret()).send(b"a step")) == []


@pytest.mark.parametrize("part", ["head", "body"])
def test_a_step_that_was_changed_is_refused(part):
    def send(group, head, body):
        (head if part == "head" else body)[-1] ^= 1
        group.broadcast(head)
        group.broadcast(body)

    assert refused(send) == []


def test_a_step_of_before_is_refused():
    def send(group, head, body):
        for tensor in (head, body, head):
            group.broadcast(tensor)

    assert refused(send) == [b"a step"]


@pytest.mark.parametrize("size", [1 << 62, -1])
def test_a_size_is_not_believed_before_it_is_rank_0s(size):
    """Nothing is allocated for it."""

    def send(group, head, body):
        _, *macs = _HEAD.unpack(bytes(head.numpy()))
        group.broadcast(torch.frombuffer(bytearray(_HEAD.pack(size, *macs)), dtype=torch.uint8))

    assert refused(send) == []


def test_a_secret_that_can_be_guessed_is_refused(monkeypatch):
    monkeypatch.setenv("TRITONLLM_RANKS_SECRET", "a secret")
    with pytest.raises(ValueError, match=r"TRITONLLM_RANKS_SECRET has 8 characters, and must have 24 at least"):
        env.ranks_secret()
    monkeypatch.setenv("TRITONLLM_RANKS_SECRET", "5" * 24 + "\n")
    assert env.ranks_secret() == b"5" * 24
    monkeypatch.delenv("TRITONLLM_RANKS_SECRET")
    assert env.ranks_secret() is None
