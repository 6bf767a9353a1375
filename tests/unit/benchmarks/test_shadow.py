from __future__ import annotations

import numpy as np

from benchmarks.shadow import ShadowCache, promised_ids
from services.speculative.hierarchy import resolve
from shared.schema.speculative import HitLevel
from tests.helpers.mesh_answers import response

GROUPS = {1: 100, 2: 100, 3: 200, 4: 0, 5: 100}


def filled() -> ShadowCache:
    cache = ShadowCache(GROUPS, width=2)
    cache.fill([1, 2], np.array([[1, 2], [3, 6]], np.float32), as_of_s=10)
    cache.fill([3], np.array([[9, 9]], np.float32), as_of_s=20)
    return cache


def test_exact_then_the_mean_of_the_group_then_nothing() -> None:
    vectors, levels = filled().lookup([1, 5, 4, 77], as_of_s=30)
    assert levels.tolist() == [HitLevel.EXACT, HitLevel.USER_AGGREGATE, HitLevel.NONE, HitLevel.NONE]
    np.testing.assert_array_equal(vectors, [[1, 2], [2, 4], [0, 0], [0, 0]])


def test_what_was_made_for_a_later_time_is_not_seen() -> None:
    vectors, levels = filled().lookup([3, 1], as_of_s=19)
    assert levels.tolist() == [HitLevel.NONE, HitLevel.EXACT]
    assert not vectors[0].any()


def test_a_later_fill_replaces_a_pair() -> None:
    cache = filled()
    cache.fill([1], np.array([[7, 7]], np.float32), as_of_s=15)
    assert cache.lookup([1], 15)[0].tolist() == [[7, 7]]
    assert cache.lookup([1], 14)[1].tolist() == [HitLevel.USER_AGGREGATE], "the pair of 10 is gone, its group is not"


def test_agrees_with_the_service_on_random_stores() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        keys = np.sort(rng.choice(200, 40, replace=False)).astype(np.int64)
        groups = {key: int(rng.integers(0, 6)) for key in range(200)}
        stored = rng.normal(size=(40, 3)).astype(np.float32)
        cache = ShadowCache(groups, width=3)
        cache.fill(keys.tolist(), stored, as_of_s=1)
        asked = rng.choice(250, 60, replace=False).astype(np.int64)
        own = np.array([groups.get(key, 0) for key in asked.tolist()], np.int64)
        vectors, levels = resolve(asked, own, keys, np.array([groups[key] for key in keys.tolist()]), stored)
        shadow_vectors, shadow_levels = cache.lookup(asked.tolist(), as_of_s=1)
        np.testing.assert_array_equal(shadow_levels, levels)
        np.testing.assert_allclose(shadow_vectors, vectors, rtol=1e-6)


def test_only_full_pass_candidates_without_an_exact_hit_are_promised() -> None:
    # ranks 1 to 3 have exact hits, 4 to 6 aggregates, 7 to 10 none; from 11 on the first pass scored
    whole = response()
    assert promised_ids(whole, 100) == [4, 5, 6, 7, 8, 9, 10]
    assert promised_ids(whole, 2) == [4, 5]
    assert promised_ids(response(degraded=["sequence"], reasons={"sequence": "late"}), 100) == []
