"""A short log directory as a run leaves it, made on the CPU: scalars, config text and one profile of a jitted step.
Also a real browser. Fixtures of the tests of observe and explain."""

import os
import shutil

import jax
import jax.numpy as jnp
import pytest

from ridgeline.configs.schema import LoggingConfig, ProfilerConfig
from ridgeline.observe.profiler import Profiler, step_annotation
from ridgeline.observe.writers import build_writers


@pytest.fixture(scope="session")
def toy_step():
    """A compiled step, named scopes included, and its argument."""

    def toy_step(x):
        with jax.named_scope("mlp"):
            x = jax.lax.fori_loop(0, 3, lambda _, y: jnp.tanh(y @ x), x)
        return x / jnp.linalg.norm(x)

    x = jnp.ones((256, 256))
    return jax.jit(toy_step).lower(x).compile(), x


@pytest.fixture(scope="session")
def run_steps(toy_step):
    """A function that runs steps as the trainer does and returns the directories of the finished captures."""

    def run(profiler, steps):
        compiled, x = toy_step
        finished = []
        for step in range(steps):
            finished.append(profiler.before_step(step, drain=lambda: None))
            with step_annotation(step):
                x = jax.block_until_ready(compiled(x))
        finished.append(profiler.close(steps))
        return [directory for directory in finished if directory is not None]

    return run


@pytest.fixture(scope="session")
def run_dir(tmp_path_factory, toy_step, run_steps):
    """A run directory with scalars, the config text and a capture of steps 3 and 4."""
    directory = tmp_path_factory.mktemp("run")
    writer = build_writers(LoggingConfig(), directory, name="toy", run="r", config={"name": "toy", "trainer": {"steps": 40}})
    for step in range(1, 41):
        writer.write(
            step,
            {
                "train/accuracy": step / 80,
                "train/loss": 4.0 / step,
                "train/grad_norm": 1.0 + step % 5,
                "train_speed/tokens_per_s": 1000.0 + step,
            },
        )
        writer.write(step, {"train_goodput/goodput": 1 - 1 / (1 + step), "train_goodput/productive_s": float(step)})
    writer.write(40, {"eval/val/loss": 0.5, "eval/val/bits_per_byte": 1.5})
    writer.close()
    compiled, _ = toy_step
    run_steps(Profiler(ProfilerConfig(start_step=3, num_steps=2), directory, hlo_text=compiled.as_text, step_time_s=lambda: 0.001), 8)
    return directory


@pytest.fixture(scope="session")
def capture_dir(run_dir):
    """The capture in it."""
    (directory,) = (run_dir / "tensorboard" / "plugins" / "profile").iterdir()
    return directory


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    chromium, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or chromedriver is None:
        if os.environ.get("CI") == "true":
            pytest.fail("CI must have Chromium: apt-get install chromium chromium-driver")
        pytest.skip("Chromium is not installed")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--window-size=1400,1300",
        f"--user-data-dir={tmp_path_factory.mktemp('chromium')}",
    ):
        options.add_argument(argument)
    driver = webdriver.Chrome(options=options, service=Service(chromedriver))
    yield driver
    driver.quit()
