import numpy as np

from llamaherd.scheduler.prefix_cache import LogitsCache, PrefixCache, best_match, common_prefix


def ids(*tokens):
    return np.array(tokens, np.int32)


def test_common_prefix():
    assert common_prefix(ids(1, 2, 3), ids(1, 2, 4, 5)) == 2
    assert common_prefix(ids(1, 2), ids(1, 2, 3)) == 2
    assert common_prefix(ids(), ids(1)) == 0


def test_best_match_is_the_longest():
    holders = [(0, ids(1, 2)), (1, ids(1, 2, 3, 9)), (2, ids(7))]
    match = best_match(ids(1, 2, 3, 4), holders)
    assert match is not None
    assert (match.sequence, match.length) == (1, 3)
    assert best_match(ids(5), holders) is None


def test_recurrent_states_match_in_full_or_not_at_all():
    holders = [(0, ids(1, 2)), (1, ids(1, 2, 3, 9))]
    match = best_match(ids(1, 2, 3, 4), holders, whole=True)
    assert match is not None
    assert (match.sequence, match.length) == (0, 2)


def test_least_recently_used_goes_first():
    cache = PrefixCache()
    for sequence in (4, 5, 6):
        cache.put(sequence, [sequence])
    cache.touch(4)
    assert cache.oldest() == 5
    assert cache.oldest(but=5) == 6


def test_what_a_longer_sequence_covers_is_known():
    cache = PrefixCache()
    cache.put(1, [1, 2])
    cache.put(2, [1, 3])
    assert cache.covered_by(ids(1, 2, 3)) == [1]


def test_a_keeping_is_over_when_the_sequence_was_taken():
    cache = PrefixCache()
    keeping = cache.put(1, [1])
    assert cache.holds(1, keeping)
    cache.take(1)
    cache.put(1, [2])
    assert not cache.holds(1, keeping)


def test_logits_cache_forgets_the_oldest():
    cache = LogitsCache(limit=2)
    rows = [np.full(3, i, np.float32) for i in range(3)]
    cache.put(ids(0), rows[0])
    cache.put(ids(1), rows[1])
    assert cache.get(ids(0)) is rows[0]
    cache.put(ids(2), rows[2])
    assert cache.get(ids(1)) is None
    assert cache.get(ids(0)) is rows[0]
