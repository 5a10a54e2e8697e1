"""The simulated cluster: it keeps what comes, its replicas keep within their memory, and its router is the real one."""

import json
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.rendezvous import placed_slowly, ranked

from bench import tables
from bench.cluster import __main__ as command
from bench.cluster import cache, replica
from bench.cluster import table as cluster_table
from bench.cluster.replica import Phase
from bench.cluster.request import Request
from bench.cluster.routing import POLICIES, Names, Router, Routing
from bench.cluster.simulation import Cluster, Simulation
from bench.cluster.step_times import GPU_BYTES, MODEL, measured
from bench.cluster.traffic import Traffic, chats, single
from bench.engine_floors import READ_OVER_COPY, Shape
from bench.engine_workloads import MODELS
from bench.reports import RESULTS, kind_of
from tritonllm.http.ask import ANSWER_TOKENS, Ask
from tritonllm.route.config import BackendConfig, RouterConfig
from tritonllm.route.pool import Pool

pytestmark = pytest.mark.long

TIMES = measured()
SHORT = 10.0  # seconds


def simulated(cluster, rate=2.0, seed=0, seconds=SHORT, times=TIMES, traffic=Traffic, **more):
    """A simulation that has run; ``rate`` is for each GPU."""
    came = chats(traffic(requests_per_second=rate * cluster.gpus, **more), seconds, seed)
    simulation = Simulation(cluster, came, times, warm_up=0.0, seconds=seconds, seed=seed)
    simulation.row = simulation.run()
    return simulation


def clusters():
    """Small ones of every kind."""
    routing = st.builds(
        Routing, policy=st.sampled_from(POLICIES), routers=st.integers(1, 3), epsilon=st.sampled_from([0.0, 0.25, 4.0])
    )
    blocks = st.sampled_from([2500, 6000, None])
    tier = st.sampled_from([{}, {"host_tokens": 50_000}, {"shared_tokens": 200_000}])

    def made(gpus, kind, routing, blocks, tier, lost_at):
        many = {"prefill": {"prefill": gpus // 2}, "lost": {"lost": gpus // 2, "lost_at": lost_at}}.get(kind, {})
        return Cluster(gpus=gpus, routing=routing, blocks=blocks, **many, **tier)

    kinds = st.sampled_from(["mixed", "prefill", "lost"])
    return st.builds(made, st.integers(1, 5), kinds, routing, blocks, tier, st.sampled_from([0.0, 3.0, SHORT]))


class Watched(cache.BlockCache):
    """Fails as soon as more blocks are in use than there are."""

    def _shrink(self):
        super()._shrink()
        assert self.used >= 0 and self.used + self.kept_blocks <= self.blocks
        assert self.kept_blocks == sum(self._kept.values())

    def admit(self, request, tokens):
        before = self.used, self.kept_blocks
        found = super().admit(request, tokens)
        assert self.used + self.kept_blocks <= self.blocks
        assert (found is None) == (before == (self.used, self.kept_blocks)) and (found or 0) < request.prompt
        return found


@settings(deadline=None, max_examples=examples(40))
@given(clusters(), st.sampled_from([0.5, 3.0, 9.0]), st.integers(0, 99))
def test_every_request_ends_once_and_no_replica_holds_more_than_it_has(cluster, rate, seed):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replica, "BlockCache", Watched)
        ends = []
        patch.setattr(
            Simulation, "_follow", lambda self, request, now, f=Simulation._follow: _noted(self, request, now, f)
        )
        patch.setattr(Simulation, "ends", ends, raising=False)
        run = simulated(cluster, rate=rate, seed=seed)
    found = run.measures
    assert found.arrived == found.ended + found.failed and found.ended == len(ends) == len(set(ends))
    if not cluster.lost:
        assert found.generated == found.tokens_ended and not found.retried
    for one in run.replicas:
        assert len(one) == one.cache.used == one._context == one._left == one._queued == one.coming == 0
    for router in run._routers:
        assert not router._loads.any() and router._total == 0


def _noted(simulation, request, now, follow):
    assert request.left == 0 and request.arrival <= request.first <= now and request.cached < request.prompt
    simulation.ends.append(request.turn)
    follow(simulation, request, now)


def test_the_same_seed_gives_the_same_result():
    cluster = Cluster(gpus=3, routing=Routing(policy="random", routers=2))
    rows = [simulated(cluster, seed=seed).row for seed in (1, 1, 2)]
    assert rows[0] == rows[1] != rows[2]


@pytest.mark.parametrize("rate", [2.0, 12.0])
def test_many_steps_at_once_are_as_good_as_one_at_a_time(monkeypatch, rate):
    cluster = Cluster(gpus=2, routing=Routing(policy="session"))
    ours = simulated(cluster, rate=rate, seconds=5.0).row
    plan = replica.Replica.plan

    def one_step(self, now):
        plan(self, now)
        if self.phase is not None:
            self.phase.steps = 1

    monkeypatch.setattr(replica.Replica, "plan", one_step)
    slow = simulated(cluster, rate=rate, seconds=5.0).row
    for name in ("first_token_ms", "hit_rate", "imbalance", "over_objective", "requests"):
        assert ours[name] == pytest.approx(slow[name], rel=1e-6), name
    for percent in ("p50", "p99"):  # a phase's steps count with their mean, to the width of a bin
        assert ours["between_tokens_ms"][percent] == pytest.approx(slow["between_tokens_ms"][percent], rel=0.03)


@given(st.integers(1, 500), st.floats(1e-3, 1.0), st.sampled_from([0.0, 1e-6, 1e-4]), st.floats(0, 1))
def test_a_phase_ends_after_the_step_in_which_somebody_comes(steps, first, more, part):
    phase = Phase(5.0, steps, first, more, 1, [])
    passed = part * phase.seconds(steps)
    phase.cut(5.0 + passed)
    close = 1e-9 * phase.seconds(steps) + 1e-9
    assert phase.seconds(phase.steps) >= passed - close
    assert phase.steps == 1 or phase.seconds(phase.steps - 1) <= passed + close


def test_one_replica_is_the_same_under_all_policies():
    rows = [simulated(Cluster(gpus=1, routing=Routing(policy=policy)), rate=4.0).row for policy in POLICIES]
    assert all(row == rows[0] for row in rows)


def test_chats_that_stay_find_more_than_chats_that_wander():
    rates = [
        simulated(Cluster(gpus=8, routing=Routing(policy=policy, epsilon=2.0)), seconds=20.0).row["hit_rate"]
        for policy in ("session", "random")
    ]
    assert rates[0] > 2 * rates[1] > 0


def test_a_shared_store_gives_back_what_wandering_loses():
    least = Routing(policy="least-tokens")
    alone = simulated(Cluster(gpus=8, routing=least)).row
    shared = simulated(Cluster(gpus=8, routing=least, shared_tokens=10**8)).row
    assert shared["hit_rate"] > 2 * alone["hit_rate"] and shared["loaded_rate"] > 0 == alone["loaded_rate"]
    slow = simulated(Cluster(gpus=8, routing=least, shared_tokens=10**8, link_bytes_per_second=1e9)).row
    assert slow["first_token_ms"]["p50"] > 2 * shared["first_token_ms"]["p50"]


def test_twice_the_replicas_under_twice_the_load_are_the_same_cluster():
    few, many = (
        simulated(Cluster(gpus=gpus, routing=Routing(policy="random")), rate=2.0, seconds=30.0).row for gpus in (16, 32)
    )
    for name in ("output_tokens_per_second_gpu", "requests_per_second_gpu", "mean_prompt"):
        assert many[name] == pytest.approx(few[name], rel=0.1), name
    assert many["first_token_ms"]["p50"] == pytest.approx(few["first_token_ms"]["p50"], rel=0.1)


def test_a_hot_prompt_overloads_one_replica_unless_its_load_is_bounded():
    hot = {"zipf": 3.0}
    bounded, free = (
        simulated(Cluster(gpus=8, routing=Routing(policy="prefix", epsilon=epsilon)), **hot).row
        for epsilon in (0.25, 1e9)
    )
    assert free["imbalance"] > 4 > 2 > bounded["imbalance"]
    assert free["first_token_ms"]["p99"] > 3 * bounded["first_token_ms"]["p99"]


def test_requests_of_lost_replicas_go_elsewhere_or_fail():
    cluster = Cluster(gpus=6, routing=Routing(policy="session"), lost=2, lost_at=4.0)
    run, whole = simulated(cluster, rate=3.0), simulated(Cluster(gpus=6, routing=Routing(policy="session")), rate=3.0)
    assert run.row["retried"] > 0 and run.row["failed"] > 0 == whole.row["failed"]
    assert all(len(one) == 0 and one.cache.kept_blocks == 0 for one in run.replicas[:2])
    assert run.row["first_token_ms"]["p99"] > whole.row["first_token_ms"]["p99"]


@given(decodes=st.integers(1, 256), keys=st.integers(0, 2000), chunk=st.integers(0, 8192))
@pytest.mark.smoke
def test_no_step_is_faster_than_the_floor(decodes, keys, chunk):
    ceilings = json.loads((RESULTS / "engine-h200.json").read_text())["ceilings"]
    shape = Shape.of(MODELS[MODEL])
    bandwidth = READ_OVER_COPY * ceilings["copy_gb_per_s"] * 1e9
    took = TIMES.step(decodes, decodes * keys, chunk, chunk * chunk / 2)
    flops = (decodes + chunk) * shape.token_flops + chunk * chunk / 2 * shape.pair_flops
    assert took > (shape.weight_bytes(1) + decodes * keys * shape.kv) / bandwidth
    assert took > flops / (ceilings["matmul_tflop_per_s"] * 1e12)
    assert took <= TIMES.step(decodes + 1, (decodes + 1) * keys, chunk, chunk * chunk / 2)


def test_a_full_replica_stays_below_the_floors_rate():
    count = 512
    run = Simulation(Cluster(gpus=1), single([0.0] * count, [64] * count, [64] * count), TIMES, warm_up=0, seconds=1e6)
    run.run()
    rate = count * 64 / run.replicas[0].busy
    assert run.measures.tokens_ended == count * 64 and 0.2 * TIMES.floor_rate < rate < TIMES.floor_rate


def test_constants_come_from_the_files_that_are_named():
    facts = TIMES.facts()
    names = {where.split(",")[0] for where in facts["sources"].values() if ".json" in where.split(",")[0]}
    assert names and all((RESULTS / name.split(":")[0]).exists() for name in names)
    assert 0 < TIMES.blocks * 16 * TIMES.kv_bytes < GPU_BYTES and TIMES.beside_seconds > 0 < TIMES.server_seconds
    assert list(TIMES.rows_seconds) == sorted(TIMES.rows_seconds)


@given(st.binary(max_size=64), st.integers(1, 50))
def test_a_key_prefers_the_replicas_in_the_routers_order(key, count):
    names = Names(count)
    order = np.argsort(names.weights(key))[::-1]
    assert [names.all[at] for at in order] == ranked(key, names.all)


def asked(number, tokens):
    """A request of session ``number`` as the simulation and as the router know it."""
    ours = Request(number, number, 0, 1, tokens - 1, 0, 10, 0.0)
    key = Routing(policy="session").key(ours)
    return ours, Ask("POST", "/v1/completions", "", (), b"", "id", None, key, tokens + ANSWER_TOKENS)


@settings(deadline=None, max_examples=examples(30))
@given(st.sampled_from(["round-robin", "least-tokens", "session"]), st.integers(1, 9), st.integers(0, 1000))
def test_choices_are_those_of_the_router(policy, count, seed):
    names, chance = Names(count), random.Random(seed)
    theirs = "prefix" if policy == "session" else policy
    backends = tuple(BackendConfig(url=f"http://{name}", name=name) for name in names.all)
    pool = Pool(RouterConfig(backends=backends, policy=theirs), chance=lambda: 0.0)
    for backend in pool.backends.values():
        backend.alive = backend.any_model = True
    router, running = Router(Routing(policy=policy), names, [seed]), []
    for _ in range(60):
        request, ask = asked(chance.randrange(20), chance.choice([20, 4000, 30_000]))
        chosen, backend = router.choose(request), pool.choose(ask)
        assert names.all[chosen] == backend.label
        if policy == "session":
            loads = {one.label: one.tokens for one in pool.backends.values()}
            assert backend.label == placed_slowly(ask.key, loads, 0.25, 8192)
        carrying = backend.carrying(router.estimate(request))
        carrying.__enter__()
        router.add(chosen, router.estimate(request))
        running.append((carrying, chosen, router.estimate(request)))
        if chance.random() < 0.4:
            carrying, chosen, tokens = running.pop(chance.randrange(len(running)))
            carrying.__exit__(None, None, None)
            router.take(chosen, tokens)


def test_sessions_keep_their_tokens():
    came = chats(Traffic(requests_per_second=50.0, think=(1.0, 0.5)), 20.0, 3, before=10.0)
    for session in range(len(came.begin) - 1):
        turns = slice(came.begin[session], came.begin[session + 1])
        said = np.concatenate([[0], np.cumsum(came.question[turns] + came.answer[turns])[:-1]])
        assert (came.history[turns] == said).all() and (np.diff(came.at[turns]) > 0).all()
    assert came.at[came.begin[:-1]].min() < 0 < came.at.max()
    assert len(came.at) / 30 == pytest.approx(50.0, rel=0.1)


@pytest.mark.parametrize(
    "make, what",
    [
        (lambda: Cluster(gpus=0), "gpus must be"),
        (lambda: Cluster(gpus=2, prefill=2), "a GPU that decodes"),
        (lambda: Cluster(gpus=2, lost=2), "takes requests"),
        (lambda: Cluster(gpus=2, host_tokens=1, shared_tokens=1), "not both"),
        (lambda: Cluster(gpus=3, prefill=2, lost=1), "without separate prefill"),
        (lambda: Routing(policy="best"), "policy must be one of"),
        (lambda: Routing(routers=0), "routers must be"),
        (lambda: Traffic(requests_per_second=0), "requests_per_second must be"),
    ],
)
def test_bad_arguments_are_named(make, what):
    with pytest.raises(ValueError, match=what):
        make()


def test_routers_that_do_not_know_of_each_other_place_worse():
    one, many = (
        simulated(Cluster(gpus=8, routing=Routing(policy="least-tokens", routers=routers)), rate=4.0).row
        for routers in (1, 64)
    )
    assert many["first_token_ms"]["p99"] > 1.1 * one["first_token_ms"]["p99"]
    assert many["imbalance"] > one["imbalance"]


def test_writes_a_report(tmp_path, capsys):
    out = tmp_path / "cluster.json"
    sizes = ["--gpus", "2,3", "--seconds", "2", "--warm-up", "1"]
    assert command.main([*sizes, "--only", "routing,separate,caches", "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    assert kind_of(report) == "cluster" and {"commit", "date", "seed", "step_times", "traffic"} <= set(report)
    text = tables.table(report, ())
    assert text.partition("\n\n")[2] in capsys.readouterr().out
    assert {row["study"] for row in report["cluster"]} == {"routing", "separate", "caches"}
    assert text.count("| least-tokens, shared store |") == 2 and "2 : 1" in text
    assert cluster_table.sizes(report).count("\n") == 1 + 2 and "apart, 2 : 1 GPUs" in cluster_table.breaks(report)
    for row in report["checked"]:
        assert row["ratio"] == pytest.approx(row["simulated"] / row["measured"])


@pytest.mark.parametrize(
    "argv", [["--gpus", "x"], ["--gpus", "0"], ["--only", "nothing"], ["--seconds", "0"], ["--jobs", "0"]]
)
def test_bad_options_are_refused(argv, capsys):
    with pytest.raises(SystemExit):
        command.parse(argv)
    assert argv[0] in capsys.readouterr().err


def test_a_simulated_gpu_is_near_the_measured_one():
    rows = command.compared(TIMES)
    assert len(rows) == 21 and all(0.8 < row["ratio"] < 1.2 for row in rows)
