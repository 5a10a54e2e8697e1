"""What ranks are told between steps: weights come as they were sent; functions go to processes of one's own alone."""

import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tritonllm.engine.data.orders import DTYPES, Order, WeightPieces, weight_orders
from tritonllm.engine.data.step_bytes import pack, unpack
from tritonllm.engine.ranks.between_steps import BetweenSteps, RankWeights, answered, packed_call
from tritonllm.engine.ranks.launched import LaunchedRanks


@pytest.mark.parametrize("dtype", DTYPES.values())
@pytest.mark.parametrize("shape", [(), (3,), (5, 7), (2, 0)])
@pytest.mark.parametrize("piece", [8, 1 << 20])
def test_weights_travel(monkeypatch, dtype, shape, piece):
    monkeypatch.setattr("tritonllm.engine.data.orders.PIECE", piece)
    tensor, pieces, found = torch.randn(shape).to(dtype), WeightPieces(), []
    orders = list(weight_orders("w", tensor))
    for order in orders:
        received = unpack(pack(None, None, order)).order
        assert (received.kind, received.text) == ("weight", "w")
        found.append(pieces.add(received))
    assert found[:-1] == [None] * (len(orders) - 1) and torch.equal(found[-1], tensor)
    assert len(orders) == max(1, -(-tensor.numel() * tensor.itemsize // piece))


def test_a_transposed_weight_travels():
    tensor = torch.randn(4, 6).T
    (order,) = weight_orders("w", tensor)
    assert torch.equal(WeightPieces().add(order), tensor)


def test_what_is_no_weight():
    with pytest.raises(ValueError, match=r"tensor w is torch.int8: ranks take .*torch.bfloat16; cast it"):
        next(weight_orders("w", torch.zeros(2, dtype=torch.int8)))
    with pytest.raises(ValueError, match="this is no piece of w"):
        WeightPieces().add(Order("weight", "w", "torch.float32", (2,), 4, np.zeros(4, np.uint8)))


def loads(worker, weights):
    return worker.rank, worker.model_runner.model.load_weights(weights), worker.model_runner.model.name


def ranks(answer):
    memory = SimpleNamespace(load_weights=lambda weights: {name for name, _ in weights})
    return BetweenSteps(RankWeights(SimpleNamespace(name="m"), memory), 3, answer)


def call(function, *args):
    return unpack(pack(None, None, Order("call", data=np.frombuffer(packed_call(function, args, {}), np.uint8)))).order


def test_functions_answer():
    said = []
    between = ranks(said.append)
    between.do(call(loads, [("a", torch.zeros(2))]))
    between.do(call(loads, 5))
    good, bad = map(answered, said)
    assert good == ((3, {"a"}, "m"), None)
    assert bad.value is None and bad.error.startswith("TypeError: 'int' object is not iterable")


class Ran(Exception):
    """What is unpickled has been run."""


class Bomb:
    def __reduce__(self):
        return explode, ()


def explode():
    raise Ran


def test_other_ranks_unpickle_nothing():
    order = Order("call", data=np.frombuffer(pickle.dumps(Bomb()), np.uint8))
    with pytest.raises(ValueError, match="this rank, which rank 0 has not spawned, takes none"):
        ranks(None).do(order)
    with pytest.raises(ValueError, match=r"collective_rpc: ranks that a launcher or Ray has started .* no functions"):
        LaunchedRanks.check_functions(object.__new__(LaunchedRanks))
