"""Who waits for room in the engine."""

import asyncio

import pytest
from support.waiting import PATIENCE

from tritonllm.serve.engines.room import EngineRoom, QueueFullError
from tritonllm.serve.engines.shared_count import SharedCount


def taker(room, name, sequences, order):
    async def take():
        await room.wait(sequences, room.check)
        room.check(sequences)  # as whoever adds a request does
        room.take(sequences)
        order.append(name)

    return asyncio.create_task(take())


async def settle():
    for _ in range(10):
        await asyncio.sleep(0)


def test_room_is_given_in_the_order_of_arrival():
    async def run():
        room, order = EngineRoom(4, SharedCount()), []
        room.take(4)
        tasks = [taker(room, "large", 3, order), taker(room, "small", 1, order), taker(room, "last", 1, order)]
        for _ in range(2):
            await settle()
            room.give_back(1)
        await settle()
        assert order == [] and room.taken == 2, "the small ones do not overtake the large one"
        room.give_back(1)
        await asyncio.wait_for(tasks[0], PATIENCE)
        await settle()
        assert order == ["large"] and room.taken == 4
        tasks[1].cancel()
        await settle()
        room.give_back(1)
        await asyncio.wait_for(tasks[2], PATIENCE)
        assert order == ["large", "last"] and room.taken == 4

    asyncio.run(run())


def test_who_does_not_wait_does_not_overtake_who_does():
    """Each place that gets free would be the next request's that comes, and the large one would never have room."""

    async def run():
        room, order = EngineRoom(4, SharedCount()), []
        room.take(4)
        tasks = [taker(room, "large", 3, order), taker(room, "leaves", 4, order)]
        await settle()
        for _ in range(2):
            room.give_back(1)
            with pytest.raises(QueueFullError, match="sequences run or wait"):
                room.check(1)
            await settle()
        room.give_back(1)
        await asyncio.wait_for(tasks[0], PATIENCE)
        await settle()
        assert order == ["large"]
        tasks[1].cancel()
        await settle()
        room.give_back(1)
        room.check(1)  # nobody waits any more

    asyncio.run(run())


def test_room_that_another_process_makes_is_seen():
    async def run():
        places = [1, 3]
        room, order = EngineRoom(4, SharedCount(places, 0)), []
        task = taker(room, "waits", 1, order)
        await settle()
        assert not task.done()
        places[1] = 2
        await asyncio.wait_for(task, PATIENCE)
        assert room.taken == 4

    asyncio.run(run())


def test_who_is_not_taken_anyway_does_not_wait():
    class StoppedError(Exception):
        pass

    async def run():
        room, stopped = EngineRoom(4, SharedCount()), []
        room.take(4)

        def check(sequences):
            if stopped:
                raise StoppedError
            room.check(sequences)

        task = asyncio.create_task(room.wait(1, check))
        await settle()
        stopped.append(True)
        with pytest.raises(StoppedError):
            await asyncio.wait_for(task, PATIENCE)
        with pytest.raises(ValueError, match="n=5 is more than this engine queues, 4"):
            await room.wait(5, room.check)

    asyncio.run(run())
    room = EngineRoom(4, SharedCount())
    room.take(4)
    with pytest.raises(QueueFullError, match="4 sequences run or wait"):
        room.check(1)
