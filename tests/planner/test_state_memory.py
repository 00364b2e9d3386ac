"""The classic table of state bytes."""

import pytest

from ridgeline.configs.errors import UserError
from ridgeline.planner.calculators.state_memory import POLICIES, state_bytes

P = 7_000_000_000


@pytest.mark.parametrize(("zero", "expected"), [(0, 16 * P), (1, 4 * P + 12 * P / 64), (2, 2 * P + 14 * P / 64), (3, 16 * P / 64)])
def test_zero_stages_shard_optimizer_then_gradients_then_parameters(zero, expected):
    assert state_bytes(params=P, policy="adamw-mixed", zero=zero, shards=64) == expected


@pytest.mark.parametrize("policy", POLICIES)
def test_memory_falls_with_stage_and_shards(policy):
    by_stage = [state_bytes(params=P, policy=policy, zero=zero, shards=8) for zero in range(4)]
    assert by_stage == sorted(by_stage, reverse=True)
    for zero in (1, 2, 3):
        by_shards = [state_bytes(params=P, policy=policy, zero=zero, shards=n) for n in (1, 2, 64)]
        assert by_shards == sorted(by_shards, reverse=True)
        assert by_shards[0] == by_stage[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"policy": "adamw-mxied"}, "unknown policy 'adamw-mxied'; did you mean 'adamw-mixed'"),
        ({"zero": 4}, "zero=4: must be 0, 1, 2 or 3"),
        ({"shards": 0}, "shards=0"),
        ({"params": -7e9}, "params=-7e\\+09"),
        ({"params": 10, "shards": 11}, "shards=11: .*10"),
    ],
)
def test_nonsense_is_refused(change, message):
    with pytest.raises(UserError, match=message):
        state_bytes(**({"params": P, "policy": "adamw-mixed", "zero": 3, "shards": 8} | change))
