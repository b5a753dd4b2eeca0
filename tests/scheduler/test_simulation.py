import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scheduler.simulation import simulate


@given(seed=st.integers(0, 2**32), clients=st.integers(1, 30), per_client=st.integers(1, 16), devices=st.integers(1, 3))
@settings(max_examples=30, deadline=None)
def test_everything_runs_once_and_in_order(seed, clients, per_client, devices):
    outcome = simulate(seed, clients, per_client, devices)
    for ran in outcome.ran.values():
        assert ran == list(range(1, per_client + 1))


@pytest.mark.parametrize("seed", [1, 2])
def test_a_thousand_clients_and_nobody_starves(seed):
    outcome = simulate(seed, clients=1000, per_client=8)
    assert all(ran == list(range(1, 9)) for ran in outcome.ran.values())
    worst = [max(waits) for waits in outcome.waits.values()]
    total = sum(outcome.fill) * 4096
    assert max(worst) <= total, "waited longer than all the work there was"
    mean = sum(worst) / len(worst)
    assert max(worst) <= 3 * mean, "somebody waited much longer than the others"
    assert sum(outcome.fill) / len(outcome.fill) >= 0.8
