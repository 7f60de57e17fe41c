#!/usr/bin/env python3
"""Compares the overhead of a trial in accelerator-tune and in Ray Tune, in one run on the same cores.

    python3 -m venv ray && ray/bin/pip install 'ray[tune]==2.60.0'
    ray/bin/python benches/compare/tune.py target/release/examples/quadratic

Trials do nothing for one iteration. Each number is the median of five searches: the seconds of 16 trials minus those
of 4, over 12, times the trials at a time. So it leaves out what a search costs once.
"""

import contextlib
import io
import statistics
import subprocess
import sys
import tempfile
import time

SLOTS, FEW, MANY, ROUNDS = 2, 4, 16, 5


def ours(trials, *flags):
    with tempfile.TemporaryDirectory() as folder:
        since = time.perf_counter()
        command = [sys.argv[1], "--quiet", "--max-iterations", "1", "--num-samples", str(trials), "--slots", str(SLOTS)]
        subprocess.run([*command, "--out", folder, *flags], check=True, stdout=subprocess.DEVNULL)
        return time.perf_counter() - since


def rays(trials, reuse):
    from ray import tune

    class Empty(tune.Trainable):
        def step(self):
            return {"loss": 0.0, "done": True}

        def reset_config(self, new_config):
            return True

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        since = time.perf_counter()
        tune.run(Empty, num_samples=trials, stop={"training_iteration": 1}, reuse_actors=reuse, verbose=0,
                 storage_path=folder, resources_per_trial={"cpu": 1})
        return time.perf_counter() - since


def trial(search, *args):
    few, many = (statistics.median(search(count, *args) for _ in range(ROUNDS)) for count in (FEW, MANY))
    return (many - few) / (MANY - FEW) * SLOTS * 1000


def main():
    import logging

    import ray
    ray.init(num_cpus=SLOTS, logging_level=logging.ERROR, log_to_driver=False, include_dashboard=False)
    rows = [("a process each", trial(ours), trial(rays, False)), ("warm", trial(ours, "--warm"), trial(rays, True))]
    for name, own, other in rows:
        print(f"{name}: {own:.2f} ms a trial, Ray {other:.1f} ms, ratio {other / own:.0f}", flush=True)


main()
