#!/usr/bin/env python3
"""Writes tests/fixtures/tune/status.json: searches, and the tables that Ray Tune 2.60's own code prints of them.

    python tests/tune/status.py        # with `ray[tune]==2.60.0`
"""

import json
import logging
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

from ray.tune.progress_reporter import CLIReporter, _best_trial_str, _trial_errors_str, _trial_progress_str

nan, inf = float("nan"), float("inf")
ROOT = Path(__file__).resolve().parents[2]


class Trial(SimpleNamespace):
    """What the reporter asks of a trial."""

    def __str__(self):
        return self.name


def trial(search, number, status, config, result, at, failures):
    name = f"{search}_358bb_{number:05}"
    return Trial(
        name=name,
        trial_id=f"358bb_{number:05}",
        status=status,
        config=config,
        evaluated_params=config,
        last_result={**result, "config": config} if result else {},
        local_experiment_path="/results/" + search,
        temporary_state=SimpleNamespace(location=at),
        error_file=f"/results/{search}/{name}/error.txt" if failures else None,
        run_metadata=SimpleNamespace(num_failures=failures),
    )


def written(search, metric, mode, trials, rows):
    """`trials`: number, status, configuration, last result, `ip:pid` or nothing, failures."""
    made = [trial(search, *each) for each in trials]
    reporter = CLIReporter(metric=metric, mode=mode)
    reporter._metric_columns.update(reporter._infer_user_metrics(made, 3))
    best, _ = reporter._current_best_trial(made)
    lines = [_best_trial_str(best, metric)] if best else []
    lines.append(
        _trial_progress_str(made, reporter._metric_columns, total_samples=len(made), force_table=True, max_rows=rows)
    )
    errors = _trial_errors_str(made, max_rows=rows)
    lines += [errors] if errors else []
    words = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
    plain = lambda result: {name: words.get(str(value), value) for name, value in result.items()}
    fields = ("number", "status", "config", "result", "at", "failures")
    return {
        "search": search,
        "metric": metric,
        "mode": mode,
        "rows": rows,
        "trials": [{**dict(zip(fields, each)), "result": plain(each[3])} for each in trials],
        "text": "\n".join(lines) + "\n",
    }


# Names of metrics in the order of the alphabet, because results of this project have no other.
def article():
    """The search of the table in tests/fixtures/tune/article-status.txt."""
    lines = (ROOT / "tests/fixtures/tune/article-status.txt").read_text().splitlines()
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")]
    head, trials = table[0], {}
    for row in table[1:]:
        cell = dict(zip(head, row))
        number = int(cell["Trial name"][-5:])
        config = {"lr": float(cell["lr"]), "momentum": float(cell["momentum"])}
        result = {}
        if cell["acc"]:
            result = {
                "batch_count": int(cell["batch_count"]),
                "epoch": int(cell["epoch"]),
                "mean_accuracy": float(cell["acc"]),
                "num_samples": int(cell["num_samples"]),
                "time_total_s": float(cell["total time (s)"]),
                "training_iteration": int(cell["iter"]),
            }
        trials[number] = (number, cell["status"], config, result, cell["loc"], 0)
    # The line of the best trial has more digits.
    trials[6][2].update(lr=0.00032010745937302484, momentum=0.3077716737703313)
    for number in range(32):
        trials.setdefault(number, (number, "PENDING", {"lr": 0.001, "momentum": 0.5}, {}, "", 0))
    return written("TorchTrainable", "mean_accuracy", "max", [trials[number] for number in range(32)], 20)


def odd_values():
    """Columns of every kind, values that are no numbers, and failures."""
    result = lambda n, **other: {"time_total_s": 1.5 * n, "training_iteration": n, **other}
    return written(
        "odd", "mean_loss", "min",
        [
            (0, "ERROR", {"a": 1, "b": True, "c": "sgd", "d": 1e-7, "e": [1, 2], "f": None}, result(3, mean_loss=nan), "", 2),
            (1, "TERMINATED", {"a": 12345678, "b": False, "c": "it's", "d": 12.5, "e": [], "f": 0.5}, result(1200000, mean_loss=1e-5), "", 1),
            (2, "RUNNING", {"a": -3, "b": True, "c": "adam", "d": 123456789.0, "e": [0.1], "f": "x"}, result(7, mean_loss=inf), "10.0.0.2:77", 0),
            (3, "PAUSED", {"a": 40, "b": True, "c": "", "d": -0.000123456789, "e": ["q"], "f": 3}, result(2, mean_loss=-2.0), "", 0),
            (4, "PENDING", {"a": 5, "b": False, "c": "b c", "d": 100.0, "e": {"x": 1}, "f": None}, {}, "", 0),
        ],
        None,
    )


def many():
    """More trials than rows, of four states. (Where rows are not dealt out evenly, Ray shows some more than it counts.)"""
    states = ["TERMINATED"] * 6 + ["ERROR"] * 10 + ["RUNNING"] * 2 + ["PENDING"] * 5
    trials = [
        (n, state, {"lr": 0.5 / (n + 1)}, {"loss": 1.0 / (n + 2), "time_total_s": 0.25, "training_iteration": 1}
         if state != "PENDING" else {}, "h:1" if state == "RUNNING" else "", int(state == "ERROR"))
        for n, state in enumerate(states)
    ]
    return written("many", "loss", "min", trials, 8)


cases = {"article": article(), "odd values": odd_values(), "many": many()}
out = ROOT / "tests/fixtures/tune/status.json"
out.write_text(json.dumps(cases, indent=1, allow_nan=False) + "\n")
for name, case in cases.items():
    print(name, case["text"], sep="\n", file=sys.stderr)
