import statistics

from llamaherd.scheduler.draws import uniform


def test_draws_depend_on_seed_candidate_and_step_alone():
    assert uniform(1, 2, 3) == uniform(1, 2, 3)
    assert len({uniform(s, c, t) for s in range(5) for c in range(5) for t in range(5)}) == 125


def test_draws_are_uniform():
    draws = [uniform(7, c, t) for c in range(20) for t in range(500)]
    assert all(0 <= d < 1 for d in draws)
    assert abs(statistics.mean(draws) - 0.5) < 0.01
    assert abs(statistics.pvariance(draws) - 1 / 12) < 0.005
    tenths = [sum(int(d * 10) == k for d in draws) for k in range(10)]
    assert max(tenths) - min(tenths) < 200
