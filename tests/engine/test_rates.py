import pytest

from tritonllm.engine.schedule.rates import LATENCY, Rates


def test_loading_pays_until_something_else_is_known():
    assert Rates().pays(1)
    assert Rates(block_bytes=1 << 40, bytes_per_second=1.0).pays(1)


@pytest.mark.parametrize(("seconds_per_token", "pays"), [(0.9, False), (1.1, True)])
def test_the_sooner_one_wins(seconds_per_token, pays):
    rates = Rates(block_bytes=16, block_tokens=16, bytes_per_second=1.0, seconds_per_token=seconds_per_token)
    assert rates.pays(1000) == pays


def test_a_copy_takes_some_time_however_short():
    rates = Rates(block_tokens=1, seconds_per_token=LATENCY / 10)
    assert not rates.pays(9) and rates.pays(11)


def test_the_average_follows_large_steps():
    rates = Rates()
    rates.idle(10.0)
    rates.took(1000, 11.0)
    assert rates.seconds_per_token == pytest.approx(1e-3)
    rates.took(10, 12.0)  # most of what a small step takes is not computing tokens
    rates.took(0, 13.0)
    assert rates.seconds_per_token == pytest.approx(1e-3)
    rates.took(1000, 15.0)
    assert 1e-3 < rates.seconds_per_token < 2e-3
    rates.idle(100.0)  # nothing ran meanwhile
    for _ in range(50):
        rates.took(600, rates.since + 0.6)
    assert rates.seconds_per_token == pytest.approx(1e-3, rel=1e-3)
