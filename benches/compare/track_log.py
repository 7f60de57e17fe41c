#!/usr/bin/env python3
"""Compares the time to log a step of 20 scalars on the training thread with TensorBoard's own writers.

    cargo bench -p burn-accelerate-track --bench log --no-run     # prints the binary
    benches/compare/track_log.py BINARY [--rounds 5] [--json]

Runs the binary and each writer in turn, in rounds. `tensorboard.summary.Writer` is TensorBoard's; `SummaryWriter` is
tensorboardX's, whose interface `torch.utils.tensorboard` has. Writers that are not installed are left out, and
reported. Times to the end of the program include writing everything to files.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time

SCALARS = 20
STEPS = 2000


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("binary")
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--json", action="store_true")
    arguments = arguments.parse_args()
    sides = {"ours": lambda: ours(arguments.binary)}
    for name, opened in (("tensorboard.summary.Writer", tensorboard), ("tensorboardX.SummaryWriter", tensorboard_x)):
        try:
            opened(tempfile.mkdtemp()).close()
        except ImportError as error:
            print(f"left out: {name}: {error}", file=sys.stderr)
            continue
        sides[name] = lambda opened=opened: theirs(opened)
    measured = {name: [] for name in sides}
    for _ in range(arguments.rounds):
        for name, measure in sides.items():
            measured[name].append(measure())
    medians = {
        name: {what: statistics.median(x[what] for x in rounds) for what in rounds[0]} for name, rounds in measured.items()
    }
    if arguments.json:
        print(json.dumps(medians))
        return
    for name, median in medians.items():
        ratio = median["log_us"] / medians["ours"]["log_us"]
        print(f"{name:<30} {median['log_us']:9.2f} µs a step, {median['point_us']:7.3f} µs a point until written, {ratio:6.1f} times ours")


def ours(binary):
    printed = subprocess.run([binary, "--rounds", "1", "--json"], check=True, capture_output=True, text=True, timeout=300)
    figures = json.loads(printed.stdout)
    return {"log_us": figures["log_us"], "point_us": figures["write_s"] / figures["points"] * 1e6}


def theirs(opened):
    with tempfile.TemporaryDirectory() as folder:
        writer = opened(folder)
        tags = [f"train/metric-{at}" for at in range(SCALARS)]
        started = time.perf_counter()
        for step in range(STEPS):
            for at, tag in enumerate(tags):
                writer.add_scalar(tag, at / (step + 1), step)
        logged = time.perf_counter()
        writer.flush()
        writer.close()
        ended = time.perf_counter()
    return {"log_us": (logged - started) / STEPS * 1e6, "point_us": (ended - started) / STEPS / SCALARS * 1e6}


def tensorboard(folder):
    from tensorboard.summary import Writer

    return Writer(folder)


def tensorboard_x(folder):
    from tensorboardX import SummaryWriter

    return SummaryWriter(folder)


main()
