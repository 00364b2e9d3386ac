"""TensorBoard as a user sees it: served from a run directory and opened in a real browser.

Nothing outside this machine is needed: the pages' few remote extras (web fonts, Google charts) may be missing.
"""

import os
import re
import shutil
import subprocess
import sys

import jax
import pytest

from ridgeline.explain.trace.analysis import analyze
from ridgeline.explain.trace.capture import find_capture
from ridgeline.explain.trace.load import load_profile
from ridgeline.explain.trace.publish import publish

pytestmark = pytest.mark.browser

WAIT_S = 90  # a bound for a loaded machine; pages render within seconds

# Runs over a page through its shadow roots, of which TensorBoard's pages are made.
WALK = """
function walk(node, visit) {
  visit(node);
  if (['STYLE', 'SCRIPT', 'NOSCRIPT'].includes(node.tagName)) return;
  if (node.shadowRoot) walk(node.shadowRoot, visit);
  node.childNodes.forEach(child => walk(child, visit));
}
"""
PAGE_TEXT = (
    WALK
    + """
const texts = [];
walk(document.body, node => { if (node.nodeType === 3 && node.textContent.trim()) texts.push(node.textContent.trim()); });
return texts.join('\\n');
"""
)
# Curves of the scalars page that are more than a point: length of each line's path.
CURVES = (
    WALK
    + """
const lengths = [];
walk(document.body, node => {
  if (node.tagName === 'path' && node.classList.contains('line')) lengths.push(node.getAttribute('d').length);
});
return lengths.filter(length => length > 200).length;
"""
)
# Pictures that have been loaded and are shown at a size one can read.
IMAGES = (
    WALK
    + """
let count = 0;
walk(document.body, node => { if (node.tagName === 'IMG' && node.complete && node.naturalWidth >= 500) count += 1; });
return count;
"""
)
# Distinct colors drawn on the trace viewer's canvases.
COLORS = (
    WALK
    + """
const colors = new Set();
walk(document.body, node => {
  if (node.tagName !== 'CANVAS' || !node.width || !node.height) return;
  const data = node.getContext('2d').getImageData(0, 0, node.width, node.height).data;
  for (let i = 0; i < data.length; i += 4) if (data[i + 3]) colors.add((data[i] << 16) | (data[i + 1] << 8) | data[i + 2]);
});
return colors.size;
"""
)


@pytest.fixture(scope="module")
def analysed_run(run_dir, tmp_path_factory):
    """The run with its capture analyzed: figures and the step ledger beside its own scalars."""
    directory = tmp_path_factory.mktemp("analyzed") / "run"
    shutil.copytree(run_dir, directory)
    (directory / "run.json").write_text("{}")
    capture = find_capture(directory)
    publish(capture, analyze(load_profile(capture)))
    return directory


@pytest.fixture(scope="module")
def tensorboard_url(analysed_run):
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(analysed_run / "tensorboard"), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            lines = []
            for line in server.stderr:
                lines.append(line)
                if found := re.search(r"TensorBoard \S+ at (http://\S+)", line):
                    break
            else:
                pytest.fail("TensorBoard did not start:\n" + "".join(lines))
            yield found.group(1)
        finally:
            server.terminate()


def wait_for_text(browser, *texts):
    """Wait until the page (or the frame switched to) shows all texts; return everything it shows."""
    from selenium.common.exceptions import TimeoutException
    from selenium.webdriver.support.ui import WebDriverWait

    shown = ""

    def complete(driver):
        nonlocal shown
        shown = driver.execute_script(PAGE_TEXT)
        return all(text in shown for text in texts)

    try:
        WebDriverWait(browser, WAIT_S, poll_frequency=0.2).until(complete)
    except TimeoutException:
        pytest.fail(f"missing {[text for text in texts if text not in shown]} on a page that shows:\n{shown}")
    return shown


def wait_for_drawing(browser, script, at_least):
    """Wait until a script counts enough of what is drawn."""
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(browser, WAIT_S, poll_frequency=0.2).until(
        lambda driver: driver.execute_script(script) >= at_least, f"drawn: < {at_least}"
    )


def wait_for(browser, css):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support import expected_conditions
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(browser, WAIT_S).until(expected_conditions.presence_of_element_located((By.CSS_SELECTOR, css)))


def wait_for_click(browser, css, text):
    """Wait until an element with exactly this text is shown, and click it; a menu that is still opening shows none."""
    from selenium.common.exceptions import StaleElementReferenceException
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    def click(driver):
        for element in driver.find_elements(By.CSS_SELECTOR, css):
            if element.text == text:
                element.click()
                return True
        return False

    wait = WebDriverWait(browser, WAIT_S, poll_frequency=0.2, ignored_exceptions=[StaleElementReferenceException])
    wait.until(click, f"no {css} {text!r} to click")


def screenshot(browser, name):
    """Keep a picture for who asks for it (BROWSER_SCREENSHOTS=<directory>)."""
    if directory := os.environ.get("BROWSER_SCREENSHOTS"):
        os.makedirs(directory, exist_ok=True)
        browser.save_screenshot(os.path.join(directory, name))


def test_the_scalars_page_draws_every_metric(browser, tensorboard_url):
    browser.get(tensorboard_url + "#scalars")
    # the two groups that matter most are open without a click
    wait_for_text(browser, "eval/val/loss", "eval/val/bits_per_byte", "train/loss", "train/grad_norm", "train_speed")
    wait_for_drawing(browser, CURVES, 2)
    screenshot(browser, "scalars.png")
    browser.get("about:blank")
    browser.get(tensorboard_url + "#timeseries")  # this page lists each curve's last value and step
    shown = wait_for_text(browser, "/bits_per_byte", "/grad_norm", "train_speed", "Smoothed", "1.5", "0.5")
    assert "40" in shown.split("\n")
    screenshot(browser, "timeseries.png")


def test_goodput_and_the_step_ledger_sit_beside_the_other_scalars(browser, tensorboard_url):
    browser.get("about:blank")
    browser.get(tensorboard_url + "?tagFilter=goodput%7Cledger#timeseries")
    wait_for_text(browser, "/productive_s", "/goodput", "/compute_s", "steps")
    screenshot(browser, "ledger.png")
    browser.get("about:blank")
    browser.get(tensorboard_url + "#images")
    wait_for_text(browser, "train_step_ledger/breakdown", "steps")
    wait_for_drawing(browser, IMAGES, 1)
    screenshot(browser, "breakdown.png")


def test_the_text_page_shows_the_config_as_a_table(browser, tensorboard_url):
    browser.get("about:blank")
    browser.get(tensorboard_url + "#text")
    shown = wait_for_text(browser, "config/text_summary", "trainer.steps", "40")
    assert "| `trainer.steps`" not in shown  # rendered, not shown as source
    screenshot(browser, "text.png")


def op_threads(capture_dir):
    """Names of the host's threads that ran ops of the step: jaxlib names its thread pools differently from version to version."""
    (file,) = capture_dir.glob("*.xplane.pb")
    planes = jax.profiler.ProfileData.from_file(str(file)).planes
    lines = (line for plane in planes if plane.name == "/host:CPU" for line in plane.lines)
    names = {line.name for line in lines if any("hlo_op" in dict(event.stats) for event in line.events)}
    assert names, "the capture holds ops"
    return sorted(names)


@pytest.mark.parametrize(
    ("tool", "shown"),
    [
        ("HLO Op Profile", ("HLO Op Name", "Exclude Idle", "by_program")),
        ("Memory Profile", ("show memory profile for selected device", "no memory activity data")),  # a CPU's allocator tells none
    ],
)
def test_the_profile_page_opens_the_tool(browser, tensorboard_url, capture_dir, tool, shown):
    from selenium.webdriver.common.by import By

    browser.get("about:blank")
    browser.get(tensorboard_url + "#profile")
    browser.switch_to.frame(wait_for(browser, "iframe"))
    wait_for_text(browser, "Sessions (1)", capture_dir.name, "Overview Page")
    browser.find_elements(By.CSS_SELECTOR, "mat-select")[1].click()
    wait_for_click(browser, "mat-option", tool)
    wait_for_text(browser, *shown)
    screenshot(browser, f"{tool.replace(' ', '')}.png")


def test_the_profile_page_opens_the_capture_and_its_trace(browser, tensorboard_url, capture_dir):
    from selenium.webdriver.common.by import By

    browser.get("about:blank")
    browser.get(tensorboard_url + "#profile")
    browser.switch_to.frame(wait_for(browser, "iframe"))
    wait_for_text(browser, "Sessions (1)", capture_dir.name, "Overview Page", "Performance Summary", "Device type", "CPU")
    screenshot(browser, "profile.png")

    browser.find_elements(By.CSS_SELECTOR, "mat-select")[1].click()
    wait_for_click(browser, "mat-option", "Trace Viewer")
    browser.switch_to.frame(wait_for(browser, "iframe"))
    wait_for_text(browser, "/host:CPU", *op_threads(capture_dir))
    wait_for_drawing(browser, COLORS, 400)  # labeled bars, not just slivers
    screenshot(browser, "trace.png")
