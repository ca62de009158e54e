from llamaherd.scheduler.policy import Running, Waiting, next_waiting, plan_step, victims


def test_all_that_decode_and_one_chunk_of_prefill():
    running = [
        Running(key=1, computed=10, pending=1, started=1),
        Running(key=2, computed=0, pending=1000, started=2, prefilling=True),
        Running(key=3, computed=5, pending=1, started=3),
    ]
    plan = plan_step(running, chunk=64)
    assert plan.decode == (1, 3)
    assert (plan.prefill, plan.start, plan.end) == (2, 0, 64)
    assert plan.cells == 66


def test_chunks_end_at_multiples_whatever_was_reused():
    plan = plan_step([Running(key=1, computed=50, pending=100, started=1, prefilling=True)], chunk=64)
    assert (plan.start, plan.end) == (50, 64)


def test_prefills_take_turns():
    running = [
        Running(key=1, computed=64, pending=1000, started=1, served=5, prefilling=True),
        Running(key=2, computed=0, pending=3, started=2, served=0, prefilling=True),
    ]
    assert plan_step(running, chunk=64).prefill == 2


def test_paused_candidates_rest():
    plan = plan_step([Running(key=1, computed=1, pending=1, started=1, paused=True)], chunk=64)
    assert plan.decode == ()
    assert plan.prefill is None


def test_a_request_for_many_does_not_keep_others_out():
    waiting = [Waiting(1, "a", arrival=1, running=6), Waiting(2, "b", arrival=2)]
    chosen = next_waiting(waiting, 2, {"a": 6})
    assert chosen is not None
    assert chosen.key == 2


def test_within_a_client_the_request_with_least_then_the_oldest():
    waiting = [Waiting(1, "", 1, running=3), Waiting(2, "", 2), Waiting(3, "", 3)]
    chosen = next_waiting(waiting, 1, {"": 3})
    assert chosen is not None
    assert chosen.key == 2


def test_beams_wait_for_their_slots_and_are_not_overtaken():
    waiting = [Waiting(1, "a", 1, slots=8), Waiting(2, "b", 2)]
    assert next_waiting(waiting, 4, {}) is None
    chosen = next_waiting(waiting, 8, {})
    assert chosen is not None
    assert chosen.key == 1


def test_the_youngest_gives_way_and_the_oldest_never():
    running = [Running(key=k, computed=1, pending=1, started=s) for k, s in ((1, 3), (2, 1), (3, 2))]
    assert victims(running) == [1, 3]
    assert victims(running, keep=1) == [3]
