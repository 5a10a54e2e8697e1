from types import SimpleNamespace

import pytest

from tritonllm.config.sampling_params import SamplingParams
from tritonllm.engine.data.asleep import AsleepError
from tritonllm.engine.data.outputs import RequestOutput
from tritonllm.serve.engines.engine_client import EngineDeadError
from tritonllm.serve.engines.messages import Add, RequestFailure
from tritonllm.serve.engines.open_requests import OpenRequests
from tritonllm.serve.engines.room import EngineRoom
from tritonllm.serve.engines.shared_count import SharedCount


class Reader:
    """In the place of a collector."""

    def __init__(self, broken=False):
        self.updates, self.errors, self.broken = [], [], broken

    def put(self, update):
        if self.broken:
            raise LookupError("no such piece")
        self.updates.append(update)

    def fail(self, error):
        self.errors.append(error)


@pytest.fixture
def room():
    return EngineRoom(10, SharedCount())


def opened(room, **readers):
    aborted = []
    requests = OpenRequests(room, aborted.append)
    for name, reader in readers.items():
        requests.add(Add(name, None, bytes(8), None, {}, 0), reader, SamplingParams(n=2))
    return requests, aborted


def update_of(name, finished=False):
    return RequestOutput(name, None, (), None, finished=finished)


def test_updates_go_to_the_reader_until_the_request_ends(room):
    a, b = Reader(), Reader()
    requests, aborted = opened(room, a=a, b=b)
    assert "a" in requests and room.taken == 4
    with pytest.raises(ValueError, match="request_id 'a' is in use by an unfinished request"):
        requests.check_free("a")
    for update in (update_of("a"), update_of("a", True), update_of("a"), update_of("unknown")):
        requests.take(update)
    assert [update.finished for update in a.updates] == [False, True] and not b.updates
    assert "a" not in requests and room.taken == 2 and not aborted
    requests.check_free("a")


def test_what_the_engine_says_of_an_aborted_request_does_not_reach_the_next_one_of_its_name(room):
    requests, _ = opened(room, a=Reader())
    assert requests.drop("a") and not requests.drop("a") and room.taken == 0
    requests.expect_end("a")
    reader = Reader()
    requests.add(Add("a", None, b"", None, {}, 0), reader, SamplingParams())
    requests.take(update_of("a"))
    requests.take(update_of("a", True))
    assert not reader.updates and "a" in requests
    requests.take(update_of("a", True))
    assert len(reader.updates) == 1 and "a" not in requests


def test_what_ends_a_request_without_an_output(room):
    readers = {name: Reader() for name in ("lost", "refused", "asleep")}
    requests, _ = opened(room, **readers)
    requests.take(RequestFailure("lost", "it died", "lost"))
    requests.take(RequestFailure("refused", "too long"))
    requests.take(RequestFailure("asleep", "it sleeps", "asleep"))
    kinds = {name: [(type(error), str(error)) for error in reader.errors] for name, reader in readers.items()}
    assert kinds["refused"] == [(ValueError, "too long")] and kinds["asleep"] == [(AsleepError, "it sleeps")]
    assert [kind for kind, _ in kinds["lost"]] == [EngineDeadError] and room.taken == 0


def test_an_update_that_cannot_be_taken_in_ends_its_request_only(room):
    good, bad = Reader(), Reader(broken=True)
    requests, aborted = opened(room, good=good, bad=bad)
    requests.take(update_of("bad"))
    requests.take(update_of("good"))
    assert aborted == ["bad"] and "LookupError: no such piece" in str(bad.errors[0])
    assert len(good.updates) == 1 and not good.errors


def test_each_reader_gets_an_error_of_its_own(room):
    a, b = Reader(), Reader()
    requests, _ = opened(room, a=a, b=b)
    requests.fail(lambda: RuntimeError("the server ends"))
    assert "a" in requests and room.taken == 4
    requests.lose(lambda: EngineDeadError("it died"))
    assert "a" not in requests and room.taken == 0
    assert [len(reader.errors) for reader in (a, b)] == [2, 2] and a.errors[1] is not b.errors[1]


def test_an_observer_is_told(room):
    told = []
    requests, _ = opened(room)
    requests.observer = SimpleNamespace(
        added=lambda request_id, tokens, params: told.append(("added", request_id, tokens)),
        updated=lambda output: told.append(("updated", output.request_id)),
        failed=lambda request_id, why: told.append(("failed", request_id, why)),
        aborted=lambda request_id: told.append(("aborted", request_id)),
    )
    requests.add(Add("a", None, bytes(12), None, {}, 0), Reader(), SamplingParams())
    requests.take(update_of("a"))
    requests.drop("a")
    requests.drop("a")
    assert told == [("added", "a", 3), ("updated", "a"), ("aborted", "a")]
    del told[:]
    requests.add(Add("b", None, bytes(4), None, {}, 0), Reader(), SamplingParams())
    requests.take(RequestFailure("b", "too long"))
    assert told == [("added", "b", 1), ("failed", "b", "too long")]
