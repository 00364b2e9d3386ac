"""The timeline as a picture and as a trace."""

import xml.etree.ElementTree as ET

import pytest

from ridgeline.explain.gantt import CHART_PX, LABEL_PX, gantt_html, gantt_svg, perfetto_trace
from ridgeline.rundir.events import EventLog, event_file, event_files, read_events

SVG = "{http://www.w3.org/2000/svg}"


class Clock:
    now_s = 1000.0

    def __call__(self):
        return self.now_s


def two_starts(run_dir):
    """Compile 10 s and train 30 s with a save of 5 s in it; a day later train 40 s more, killed. Process 1 compiled 20 s."""
    for restart in (0, 1):
        clock = Clock()
        clock.now_s += 86400 * restart
        log = EventLog(event_file(run_dir, 0), run="r", clock=clock, monotonic=clock)
        if restart == 0:
            with log.phase("compile"):
                clock.now_s += 10
        train = log.phase("train", start_step=0)
        train.__enter__()
        clock.now_s += 40 - 15 * (restart == 0)
        if restart:
            log.emit("step", step=7, loss=2.5, tokens_per_s=50.0)
        else:
            with log.phase("save", step=3):
                clock.now_s += 5
            train.__exit__(None, None, None)
        log.close()
    clock = Clock()
    other = EventLog(event_file(run_dir, 1), 1, run="r", clock=clock, monotonic=clock, restart=0)
    with other.phase("compile"):
        clock.now_s += 20
    other.close()
    return read_events(event_files(run_dir))


def bars(svg):
    """Name, x and width of every bar."""
    found = []
    for group in ET.fromstring(svg).iter(f"{SVG}g"):
        (box,) = group.iter(f"{SVG}rect")
        found.append((group.find(f"{SVG}title").text.split(":")[0], float(box.get("x")), float(box.get("width"))))
    return found


def test_bars_are_as_long_as_their_phases_and_stand_where_they_ran(tmp_path):
    drawn = bars(gantt_svg(two_starts(tmp_path)))
    px_per_s = (CHART_PX - 14) / 80.0
    # bars in drawing order: per process by depth
    assert [(name, pytest.approx(width / px_per_s, abs=0.02)) for name, _, width in drawn] == [
        ("compile", 10.0),
        ("train", 30.0),
        ("train", 40.0),
        ("save", 5.0),
        ("compile", 20.0),
    ]
    starts_s = [(x - LABEL_PX) / px_per_s for _, x, _ in drawn]
    assert starts_s[0] == pytest.approx(0, abs=0.02)
    assert starts_s[1] == pytest.approx(10, abs=0.02)
    assert starts_s[3] == pytest.approx(35, abs=0.02)
    assert starts_s[2] == pytest.approx(40 + 14 / px_per_s, abs=0.02)  # the second start follows a marked gap


def test_time_between_starts_is_listed_not_drawn(tmp_path):
    assert "+23h59m" in gantt_svg(two_starts(tmp_path))


def test_names_from_outside_cannot_break_the_page(tmp_path):
    page = gantt_html(two_starts(tmp_path), "<script>alert(1)</script>")
    assert "<script>" not in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")  # nothing is loaded from elsewhere


def test_the_trace_holds_every_phase_in_microseconds(tmp_path):
    trace = perfetto_trace(two_starts(tmp_path))["traceEvents"]
    complete = [(e["name"], e["pid"], e["ts"], e["dur"]) for e in trace if e["ph"] == "X"]
    assert ("compile", 0, 0.0, 10e6) in complete
    assert ("compile", 1, 0.0, 20e6) in complete
    assert ("train", 0, 86400e6, 40e6) in complete
    assert {e["name"]: e["args"] for e in trace if e["ph"] == "C"} == {"loss": {"loss": 2.5}, "tokens_per_s": {"tokens_per_s": 50.0}}
    assert {e["args"]["name"] for e in trace if e["ph"] == "M" and e["name"] == "process_name"} == {"process 0", "process 1"}
