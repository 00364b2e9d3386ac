"""The model and the tokens that a budget buys: the minimum of the loss, found independently."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.configs.errors import UserError
from ridgeline.planner.calculators.compute_optimal import budget_flops, loss, purchase

budgets = st.floats(19, 27).map(lambda power: 10.0**power)


@given(budgets)
def test_no_other_split_of_the_budget_has_less_loss(flops):
    best = purchase(flops)
    assert best.params * best.tokens * 6 == pytest.approx(flops)
    assert (best.params, best.tokens, best.loss) == (best.optimal_params, best.optimal_tokens, best.optimal_loss)
    for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 2.0):
        assert loss(best.params * factor, best.tokens / factor) > best.loss
    assert best.extra_compute == pytest.approx(0, abs=1e-9)


@given(budgets, st.floats(0.1, 10))
def test_the_extra_compute_is_what_an_optimal_model_would_save(flops, factor):
    given_size = purchase(flops, purchase(flops).params * factor)
    assert given_size.tokens == pytest.approx(flops / 6 / given_size.params)
    saved = purchase(flops / (1 + given_size.extra_compute))
    assert saved.loss == pytest.approx(given_size.loss)
    assert given_size.extra_compute >= -1e-9


def test_the_budget_of_chinchilla_buys_about_its_model():
    """Arxiv 2404.10102, section 4: at 5.76e23 FLOP about 20 tokens per parameter, as Chinchilla (70B, 1.4T) has."""
    found = purchase(5.76e23)
    assert 60e9 < found.params < 85e9
    assert 15 < found.tokens_per_param < 25


def test_flops_of_a_budget():
    assert budget_flops(device_hours=2, peak_flops=1e15, mfu=0.5) == 3600e15
    for wrong in ({"device_hours": 0}, {"peak_flops": math.inf}, {"mfu": 1.5}):
        with pytest.raises(UserError):
            budget_flops(**({"device_hours": 1, "peak_flops": 1e15, "mfu": 0.5} | wrong))
