"""New weights, and functions, for an engine of several ranks: the tokens are those of a fresh engine."""

from functools import partial
from shutil import copytree

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engines import greedy, tiny_checkpoint, tiny_llm, token_ids
from support.on_ranks import fail_on_others, load_all, rank_and_sum
from support.wishes import SIZES, prompts_of

pytestmark = pytest.mark.usefixtures("imported_ranks")


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """The same architecture with other weights."""
    folder = tmp_path_factory.mktemp("other") / "model"
    copytree(tiny_checkpoint(), folder)
    for file in folder.glob("*.safetensors"):
        save_file({name: tensor.flip(0).contiguous() for name, tensor in load_file(file).items()}, file)
    return folder


def answers(llm):
    return token_ids(llm.generate(prompts_of([3, 11, 26, 7]), greedy(12), use_tqdm=False))


def tensors_of(folder):
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.fixture(
    scope="module",
    params=[
        {"tensor_parallel_size": 2},
        pytest.param({"pipeline_parallel_size": 2}, marks=pytest.mark.long),
        pytest.param({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, marks=pytest.mark.long),
    ],
    ids=["two ranks", "two stages", "two stages of two ranks"],
)
def llm(request):
    return tiny_llm(**SIZES, **request.param)


@pytest.fixture(scope="module")
def expected(alone):
    return answers(alone)


@pytest.fixture(scope="module")
def fresh(other):
    return answers(tiny_llm(other, **SIZES))


def test_a_folder(llm, other, expected, fresh):
    assert answers(llm) == expected
    llm.reload_weights(str(other))
    assert answers(llm) == fresh != expected
    assert llm.collective_rpc("reload_weights") == [None]
    assert answers(llm) == expected


def test_weights_of_a_trainer(llm, other, expected, fresh, monkeypatch):
    """One by one, and in pieces."""
    monkeypatch.setattr("tritonllm.engine.data.orders.PIECE", 1000)
    weights = tensors_of(other)
    assert llm.llm_engine.load_weights(iter(weights.items())) == set(weights)
    assert answers(llm) == fresh
    model = llm.llm_engine.model_executor.driver_worker.model_runner.model
    model.load_weights(tensors_of(tiny_checkpoint()).items())
    assert answers(llm) == expected


def test_weights_that_do_not_fit_are_named_and_no_rank_takes_them(llm, other, expected, tmp_path):
    name, tensor = next(iter(tensors_of(other).items()))
    for weights, message in (
        ([("model.nothing", tensor)], "tensor model.nothing has no place"),
        ([(name, tensor[1:])], rf"tensor {name} has shape"),
        ([(name, tensor * torch.nan)], f"tensor {name} has values that are NaN"),
    ):
        with pytest.raises(ValueError, match=message):
            llm.llm_engine.load_weights(weights)
    copytree(other, tmp_path / "broken")
    for file in (tmp_path / "broken").glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ValueError, match="safetensors"):
        llm.reload_weights(str(tmp_path / "broken"))
    assert answers(llm) == expected


def test_functions(llm, expected):
    """Each rank calls it with its part; what it loads there is whole, and each takes its part."""
    ranks = llm.engine.config.parallel.world_size
    found = llm.collective_rpc(rank_and_sum, args=(1,), kwargs={"name": "a"})
    assert [(rank, name) for rank, _, name in found] == [(rank, "a") for rank in range(ranks)]
    whole = sum(p.numel() for p in tiny_llm(**SIZES).engine.model.parameters())
    assert all(1 < count < whole for _, count, _ in found)
    assert llm.apply_model(load_all) == [["model.norm.weight"]] * ranks
    assert answers(llm) != expected
    llm.reload_weights()
    with pytest.raises(RuntimeError, match="collective_rpc: on rank 1: ValueError: no"):
        llm.collective_rpc(fail_on_others)
    for local in (lambda worker: 1, partial(rank_and_sum, name=lambda: 1)):
        with pytest.raises(ValueError, match="must be defined at the top of a module that they can import"):
            llm.collective_rpc(local)
    assert answers(llm) == expected
