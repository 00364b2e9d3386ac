"""Run directories as finished runs leave them, with chosen speeds."""

import json

from ridgeline.configs.dump import to_yaml
from ridgeline.configs.load import load
from ridgeline.rundir.events import EventLog, event_file


class Clock:
    """Seconds that pass when told to."""

    now_s = 1000.0

    def __call__(self):
        return self.now_s


def made_run(path, *, devices=1, step_s=0.1, startup_s=5.0, steps=40, log_every=4, overrides=(), flags=(), noise=(0.0, 0.01, -0.01)):
    """Write the directory of a run of the quickstart config that made `steps` steps of about `step_s`; return it."""
    config = load("quickstart", [f"trainer.steps={steps}", f"run_dir={path}", *overrides]).config
    clock = Clock()
    path.mkdir(parents=True)
    log = EventLog(event_file(path, 0), run="r", clock=clock, monotonic=clock)
    log.emit("environment", settings=[{"name": n, "value": v, "reason": "", "chosen": "user"} for n, v in flags])
    with log.phase("compile", program="train_step"):
        clock.now_s += startup_s
    with log.phase("train", start_step=0):
        tokens = config.data.batch_size * config.data.seq_len
        for index, step in enumerate(range(log_every, steps + 1, log_every)):
            took_s = step_s * (3.0 if index == 0 else 1 + noise[index % len(noise)])
            clock.now_s += took_s * log_every
            times = {"step_time_mean_s": took_s, "step_time_p50_s": took_s, "tokens_per_s": tokens / took_s}
            log.emit("step", step=step, loss=2.0, tokens=float(tokens * step), **times)
    log.close()
    (path / "config.yaml").write_text(to_yaml(config))
    start = {"devices": {"count": devices, "kind": "cpu", "platform": "cpu"}, "processes": 1}
    (path / "run.json").write_text(json.dumps({"name": path.name, "starts": [start]}))
    return path
