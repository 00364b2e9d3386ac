"""Loss spikes are found during training, from earlier losses only, and recorded."""

import json
import math
import random
import statistics
from types import SimpleNamespace

import pytest

from ridgeline.configs.fault_schema import LossSpikesConfig
from ridgeline.rundir.events import EventLog, read_events
from ridgeline.rundir.loss_spikes import (
    CONSECUTIVE,
    END_EVENT,
    EVENT,
    FEWEST,
    SpikeDetector,
    loss_spikes,
    recent_losses,
)
from ridgeline.rundir.skipped_batches import NOTHING_SKIPPED, batch_of_step
from ridgeline.trainer.loop import StepResult
from ridgeline.trainer.loss_spikes import LossSpikes, watch_loss_spikes

DEFAULT = LossSpikesConfig()
SIGMAS, LEAST_RISE, WINDOW = DEFAULT.sigmas, DEFAULT.min_rise, DEFAULT.window


def curve(seed, steps=600, end=2.0, sigma=0.05):
    """A falling loss with noise, some of it heavy-tailed: single batches of unusual text."""
    draw = random.Random(seed)
    outliers = [draw.uniform(0, 30 * sigma) if not draw.randint(0, 99) else 0.0 for _ in range(steps)]
    return [end + 8 * math.exp(-step / 60) + draw.gauss(0, sigma) + more for step, more in enumerate(outliers)]


def found(losses, detector=None):
    detector = detector or SpikeDetector()
    return [(step, spike) for step, loss in enumerate(losses, 1) if (spike := detector.update(step, loss)) is not None]


def first_of_three_above(losses):
    """Return the third step of the first three in a row above the limit, computed from the definition; None without any."""
    window, run = [], 0
    for step, loss in enumerate(losses, 1):
        if run == 0 and len(window) >= FEWEST:
            usual = statistics.median(window[-WINDOW:])
            limit = usual + max(LEAST_RISE, SIGMAS * 1.4826 * statistics.median(abs(x - usual) for x in window[-WINDOW:]))
        above = len(window) >= FEWEST and loss > limit
        run = run + 1 if above else 0
        if run == CONSECUTIVE:
            return step
        if not above:
            window.append(loss)
    return None


@pytest.mark.parametrize("seed", range(12))
def test_a_rise_is_found_with_its_third_step_and_nothing_else_is(seed):
    draw = random.Random(seed)
    losses = curve(seed)
    assert found(losses) == []
    at, steps = draw.randint(250, 500), draw.randint(CONSECUTIVE, 60)
    losses[at - 1] = losses[at + steps] = 2.0
    for step in range(at, at + steps):
        losses[step] += draw.uniform(3.0, 6.0)
    (seen, first), (_, last) = found(losses)
    assert seen == first_of_three_above(losses) == at + CONSECUTIVE
    assert (first.step, first.steps, first.ended) == (at + 1, CONSECUTIVE, False)
    assert (last.steps, last.recovered, last.loss) == (steps, True, max(losses[at : at + steps]))
    assert first.sigmas > SIGMAS


def test_no_step_is_judged_by_later_ones():
    losses = curve(7)
    losses[300:320] = [9.0] * 20
    whole = found(losses)
    for cut in (302, 303, 310, 321, 400):
        assert found(losses[:cut]) == [(step, spike) for step, spike in whole if step <= cut]


@pytest.mark.parametrize("seed", range(4))
def test_a_detector_goes_on_after_a_restart_at_any_step_as_without_it(seed):
    """With other settings too: spikes, limits and what is kept are those of the detector that saw all losses."""
    draw = random.Random(seed)
    config = LossSpikesConfig(window=draw.randint(32, 200), sigmas=draw.uniform(2, 8), min_rise=draw.uniform(0.05, 0.5))
    losses = curve(seed)
    for at in (draw.randint(100, 300), draw.randint(350, 500)):
        losses[at : at + 9] = [draw.uniform(5, 9) for _ in range(9)]
    losses[200] = math.nan
    whole, states, spikes = SpikeDetector(config), [], []
    for step, loss in enumerate(losses, 1):
        states.append((json.dumps(whole.state()), whole.earlier_limit))
        spikes.append(whole.update(step, loss))
    assert sum(spike is not None for spike in spikes) >= 2
    for cut in draw.sample(range(len(losses)), 12):
        state, earlier = states[cut]
        again = SpikeDetector.restored(config, json.loads(state))
        assert again.earlier_limit == earlier
        assert [again.update(step, loss) for step, loss in enumerate(losses[cut:], cut + 1)] == spikes[cut:]
        assert again.state() == whole.state() and len(again.losses) <= config.window


@pytest.mark.parametrize("seed", range(4))
def test_the_limit_of_each_batch_is_the_same_with_and_without_restarts(seed):
    """In the order of the loop: the next batch is put on the devices when the step before the running one has been read."""
    draw = random.Random(seed)
    losses = [0.0, *curve(seed, steps=120, sigma=0.3)]

    def limits(stops):
        found, detector, step = [], SpikeDetector(DEFAULT), 0
        for stop in [*stops, 120]:
            hook = LossSpikes(None, detector, None, None, NOTHING_SKIPPED)
            found.append(hook.next_limit())
            pending = None
            while step < stop:
                step += 1
                if pending is not None:
                    detector.update(pending, losses[pending])
                pending = step
                if step < stop:
                    found.append(hook.next_limit())
            detector.update(pending, losses[pending])
            detector = SpikeDetector.restored(DEFAULT, json.loads(json.dumps(hook.metadata()))["loss_spikes"])
        return found

    whole = limits([])
    assert len(whole) == 120 and len(set(whole)) > 60
    assert limits(sorted(draw.sample(range(1, 120), 15))) == whole


@pytest.mark.parametrize("seed", range(20))
def test_the_batch_of_a_step_is_that_of_a_list_without_what_is_left_out(seed):
    draw = random.Random(seed)
    ranges = [(first, first + draw.randint(1, 9)) for first in draw.choices(range(60), k=draw.randint(0, 8))]
    kept = [batch for batch in range(300) if not any(first <= batch < end for first, end in ranges)]
    assert [batch_of_step(step, ranges) for step in range(150)] == kept[:150]


def test_a_loss_that_stays_high_is_reported_once_and_judged_anew():
    losses = [0.02 + 0.001 * (step % 3) for step in range(100)] + [11.1] * 400
    (at, first), (end, last) = found(losses)
    assert (at, first.loss, end, last.recovered) == (103, 11.1, 100 + WINDOW, False)
    assert "up to 11.1" in first.describe() and "not recovered" in last.describe()


@pytest.mark.parametrize("odd", [[], [float("nan")] * 5, [float("inf"), 2.0, float("nan")]])
def test_odd_losses_are_no_spikes(odd):
    assert found([2.0] * 100 + odd + [2.0] * 10) == []
    assert found([5.0 - 0.04 * step for step in range(100)]) == []
    assert found(odd + [0.01] * 50 + [0.09] * 50) == []  # less than LEAST_RISE


def test_a_spike_is_recorded_printed_counted_and_known_to_the_next_start(tmp_path):
    log, logged = EventLog(tmp_path / "events.jsonl"), []
    recorder = SimpleNamespace(events=log, progress=SimpleNamespace(note=logged.append))
    hook = LossSpikes(recorder, SpikeDetector(), None, None, NOTHING_SKIPPED)
    losses = [3.0 + 0.01 * (step % 5) for step in range(1, 101)] + [7.0] * 10 + [3.0] * 5 + [8.0] * 3
    for step, loss in enumerate(losses, 1):
        hook.on_result(StepResult(step, False, {"loss": loss, "grad_norm": 1.0}, None, 0.1, 0.1, step))
        if step % 2 == 0:
            log.emit("step", step=step, loss=loss)
    events = read_events(log.path)
    assert [event.kind for event in events if "spike" in event.kind] == [EVENT, END_EVENT, EVENT]
    assert hook.count == 2 and len(logged) == 3 and logged[0].startswith("loss spike since step 101: up to 7")
    first, second = loss_spikes(events)
    assert (first.step, first.steps, first.ended, second.step, second.ended) == (101, 10, True, 116, False)
    seeded = recent_losses(events, 118, WINDOW)
    assert len(seeded) >= 50 and max(seeded) < 3.1
    detector = SpikeDetector(losses=seeded)
    assert [step for step, _ in found([9.0, 9.0, 9.0, 9.0], detector)] == [CONSECUTIVE]


def test_a_start_from_a_checkpoint_counts_its_spikes_without_reading_the_log(tmp_path):
    """A log grows with the run; only where a checkpoint lacks the count (of an older version) the log has it."""
    log = EventLog(tmp_path / "events.jsonl", restart=1)
    for step in (50, 90):
        log.emit(EVENT, step=step, loss=9.0, usual=3.0, sigma=0.1, steps=3)
    recorder = SimpleNamespace(events=log, progress=None)
    hook = LossSpikes(recorder, SpikeDetector(losses=[3.0, 3.5]), None, None, NOTHING_SKIPPED, count=5)
    metadata = json.loads(json.dumps(hook.metadata()))
    older = {"loss_spikes": {key: value for key, value in metadata["loss_spikes"].items() if key != "count"}}

    def start(restored):
        hook = watch_loss_spikes(DEFAULT, recorder, None, None, NOTHING_SKIPPED, 60, restored, print)
        return hook.count, hook.detector.losses

    assert [start(older), start({}), start(None)] == [(1, [3.0, 3.5]), (1, []), (1, [])]
    log.path.write_text("damaged\n" + log.path.read_text())
    assert start(metadata) == (5, [3.0, 3.5])


def test_damaged_spikes_are_left_out(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    for fields in ({}, {"step": "x", "loss": 1.0, "usual": 1.0, "sigma": 0.1}, {"step": 1, "loss": None, "usual": [], "sigma": True}):
        log.emit(EVENT, **fields)
    assert loss_spikes(read_events(log.path)) == []
