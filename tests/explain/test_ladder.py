"""Scaling-law ladders: the fit against scipy, the coverage of its intervals over drawn laws, outliers, and the document."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import least_squares

from ridgeline.configs.errors import UserError
from ridgeline.explain.report.html import document as page
from ridgeline.explain.report.ladder_charts import ladder_charts
from ridgeline.explain.report.study import study_section
from ridgeline.explain.study.document import is_ladder, markdown, read_study, study_runs, write_study
from ridgeline.explain.study.ladder import LadderQuestion, MeasuredSize, Planned, ladder_study
from ridgeline.explain.study.loss_law import ASSUMED_NOISE, HUBER, LEAST_ALPHA, MOST_ALPHA, LossLaw, Point, fit_loss_law

LAWS = 100
NOMINAL = 0.9
Truth = tuple[float, float, float]


def drawn_law(rng: np.random.Generator) -> Truth:
    """Return E, A at 1e16 FLOP, and alpha."""
    return rng.uniform(1, 2.5), rng.uniform(0.5, 3), rng.uniform(0.05, 0.4)


def loss(truth: Truth, flops: np.ndarray) -> np.ndarray:
    e, a, alpha = truth
    return e + a * (flops / 1e16) ** -alpha


def drawn_points(rng: np.random.Generator, truth: Truth, noise: float, sizes: int, repeats: int) -> list[Point]:
    flops = np.repeat(1e15 * np.cumprod(rng.uniform(2, 6, sizes)), repeats)
    return [Point(c, value) for c, value in zip(flops, loss(truth, flops) * np.exp(noise * rng.standard_normal(len(flops))), strict=True)]


def test_intervals_cover_the_truth_at_their_nominal_rate() -> None:
    """Of 100 laws with 4 to 7 sizes, 1 to 3 seeds and noise of 0.1 to 2 %. A rate of 0.9 over 100 laws has a deviation of 0.03."""
    rng = np.random.default_rng(20)
    covered: dict[str, list[bool]] = {"run": [], "law": [], "irreducible": [], "alpha": []}
    for _ in range(LAWS):
        truth, noise = drawn_law(rng), float(np.exp(rng.uniform(np.log(0.001), np.log(0.02))))
        points = drawn_points(rng, truth, noise, int(rng.integers(4, 8)), int(rng.integers(1, 4)))
        law = fit_loss_law(points)
        ahead = points[-1].flops * rng.uniform(4, 30)
        expected = float(loss(truth, np.array(ahead)))
        for name, value, (low, high) in (
            ("run", expected * np.exp(noise * rng.standard_normal()), law.interval(ahead)),
            ("law", expected, law.interval(ahead, of_run=False)),
            ("irreducible", truth[0], law.intervals["irreducible"]),
            ("alpha", truth[2], law.intervals["alpha"]),
        ):
            covered[name].append(bool(low <= value <= high))
    rates = {name: float(np.mean(found)) for name, found in covered.items()}
    assert all(NOMINAL - 0.08 <= rate <= 0.99 for rate in rates.values()), rates


def test_the_fit_has_the_least_huber_loss() -> None:
    rng = np.random.default_rng(3)
    for _ in range(10):
        points = drawn_points(rng, drawn_law(rng), 0.01, int(rng.integers(4, 9)), 2)
        law = fit_loss_law(points)
        x = np.log(np.array([p.flops for p in points]) / law.flops_scale)
        measured = np.array([p.loss for p in points])

        def residuals(c: np.ndarray, x: np.ndarray = x, measured: np.ndarray = measured) -> np.ndarray:
            return (c[0] + c[1] * np.exp(-c[2] * x)) / measured - 1

        bounds = ([0, 0, LEAST_ALPHA], [np.inf, np.inf, MOST_ALPHA])
        starts = [(e, a, alpha) for e in (0.1, 2.0) for a in (0.5, 3.0) for alpha in (0.05, 0.3, 0.9)]
        best = min((least_squares(residuals, s, bounds=bounds, loss="huber", f_scale=HUBER) for s in starts), key=lambda found: found.cost)
        ours = np.abs(residuals(np.array([law.irreducible, law.amplitude, law.alpha])))
        cost = np.sum(np.where(ours <= HUBER, ours**2 / 2, HUBER * (ours - HUBER / 2)))
        assert cost <= best.cost * 1.01 + 1e-9, (cost, best.cost)


def test_without_noise_the_law_is_found() -> None:
    rng = np.random.default_rng(8)
    for _ in range(10):
        truth = drawn_law(rng)
        points = drawn_points(rng, truth, 0.0, 7, 1)
        law = fit_loss_law(points)
        assert law.irreducible == pytest.approx(truth[0], rel=0.05) and law.alpha == pytest.approx(truth[2], rel=0.15)
        assert law.loss(points[-1].flops * 10) == pytest.approx(float(loss(truth, np.array(points[-1].flops * 10))), rel=0.005)


def test_a_diverged_run_hardly_moves_the_law() -> None:
    rng = np.random.default_rng(5)
    for _ in range(10):
        truth = drawn_law(rng)
        points = drawn_points(rng, truth, 0.002, 7, 3)
        at = int(rng.integers(3, 18))
        points[at] = Point(points[at].flops, points[at].loss * 1.4)
        ahead = points[-1].flops * 4
        assert fit_loss_law(points).loss(ahead) == pytest.approx(float(loss(truth, np.array(ahead))), rel=0.02)


def test_few_runs_give_an_assumed_noise_and_two_sizes_no_irreducible_loss() -> None:
    three = fit_loss_law([Point(1e15, 4.0), Point(1e16, 3.2), Point(1e17, 2.8)])
    assert (three.noise_measured, three.noise, three.irreducible_fitted) == (False, ASSUMED_NOISE, True)
    assert three.loss(1e17) == pytest.approx(2.8, rel=1e-3)
    two = fit_loss_law([Point(1e15, 4.0), Point(1e17, 2.0)])
    assert (two.irreducible, two.irreducible_fitted) == (0.0, False)
    assert two.alpha == pytest.approx(np.log(2) / np.log(100), rel=1e-2)
    assert isinstance(two, LossLaw) and two.interval(1e18)[0] < two.loss(1e18) < two.interval(1e18)[1]


def sizes(losses: list[list[float]]) -> list[MeasuredSize]:
    return [
        MeasuredSize(f"{32 << i}x{i + 1}", 32 << i, i + 1, 10_000 * 4**i, 2e5 * 4**i, 100, 1e12 * 16**i, [f"{i:03}"] * len(each), each)
        for i, each in enumerate(losses)
    ]


def question(flops: float = 1e18) -> LadderQuestion:
    target = Planned("big", 512, 8, 5_000_000, 1e8, flops, {"cluster": "c", "why_none": "it does not fit"})
    return LadderQuestion(20.0, "training", target, target, flops, "this machine", ["known before"])


def test_the_document_is_written_read_and_shown(tmp_path: Path) -> None:
    made = ladder_study("l", sizes([[5.0, 5.01], [4.0, 4.01], [3.4, 3.41], [3.04, 3.05]]), question())
    assert made["check"] is not None and made["check"]["size"] == "256x4" and made["check"]["inside"]
    assert made["target"]["low"] < made["target"]["loss"] < made["target"]["high"] < 3.04
    assert any("256x4 was predicted from the smaller sizes" in line for line in made["verdict"])
    assert any("it does not fit" in line for line in made["verdict"]) and "known before" in made["verdict"]
    pictures = ladder_charts(made)
    write_study(made, tmp_path, pictures)
    stored = read_study(tmp_path)
    assert stored is not None and is_ladder(stored) and stored["law"]["alpha"] == made["law"]["alpha"]
    for row in stored["rows"]:
        (tmp_path / row["runs"][0]).mkdir()
    assert study_runs(stored, tmp_path)[0] == tmp_path / "000", "a moved directory has its runs inside"
    assert "256x4" in markdown(stored) and "| FLOP |" in markdown(stored)
    assert pictures["loss"].count("<circle") == 4 + 1 + 1, "sizes, target, check"
    assert pictures["fit"] in page("l", study_section(stored)) and "<h2>Ladder</h2>" in page("l", study_section(stored))


@pytest.mark.parametrize(
    ("losses", "flops", "doubt"),
    [
        ([[5.0], [4.0]], 1e15, "two sizes cannot show"),
        ([[5.0], [4.0], [3.4]], 1e15, "three sizes determine the law"),
        ([[5.0], [4.0], [4.2], [3.0]], 1e16, "a larger size has no lower loss"),
        ([[5.0], [4.0], [3.4], [3.04]], 1e22, "times the compute of the largest run"),
        ([[5.0, 5.01], [4.0, 4.01], [3.4, 3.41], [3.39, 3.4]], 1e18, "outside of the interval"),
    ],
)
def test_what_speaks_against_the_law_is_listed(losses: list[list[float]], flops: float, doubt: str) -> None:
    assert any(doubt in line for line in ladder_study("l", sizes(losses), question(flops))["doubts"])


def test_one_finished_size_is_no_law() -> None:
    with pytest.raises(UserError, match="1 of 2 sizes are finished, and a law needs 2"):
        ladder_study("l", sizes([[5.0], []]), question())
