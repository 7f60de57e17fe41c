#!/usr/bin/env python3
"""Writes tests/fixtures/tune/ray.json: the decisions of Ray Tune's own schedulers about recorded sequences of reports.

    python3 -m venv ray && ray/bin/pip install 'ray[tune]==2.60.0'
    ray/bin/python tests/tune/reference.py > tests/fixtures/tune/ray.json

Events are [trial, "report", time, value], [trial, "end", time, value] (it ends by itself) and [trial, "fail"] (it is
repeated). Each has the decision, and for ASHA the cutoffs of all rungs after it, from the bottom; larger is better.
`brackets` are those that trials were drawn into. For PBT, a report also has whether a trial waits for a worker, and
[trial, "resume"] is the paused trial that continues.
"""

import json
import logging
import random
import types
import warnings

import numpy

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)
from ray.tune.schedulers import AsyncHyperBandScheduler, MedianStoppingRule, PopulationBasedTraining
from ray.tune.schedulers.pbt import _PBTTrialState

NAN, INF = float("nan"), float("inf")


class Trial:
    status, is_saving, last_result, experiment_tag = "RUNNING", False, {}, ""

    def __init__(self, name):
        self.trial_id = name


def number(value):
    if value is None or isinstance(value, str):
        return value
    if value != value:
        return "NaN"
    return {INF: "Infinity", -INF: "-Infinity"}.get(value, float(value))


def result(time, value):
    return {"training_iteration": time, **({} if value is None else {"m": value})}


def asha(name, events, **settings):
    """Asks ASHA for its decisions. Leaves out events of trials that have been stopped, since nobody reports them."""
    scheduler = AsyncHyperBandScheduler(metric="m", **{"mode": "max", **settings})
    live, taken, decisions, cutoffs = {}, [], [], []
    numpy.random.seed(len(events))
    for trial in sorted({event[0] for event in events}):
        live[trial] = Trial(trial)
        scheduler.on_trial_add(None, live[trial])
    drawn_into = [[trial, scheduler._brackets.index(scheduler._trial_info[trial])] for trial in live]
    for trial, kind, *rest in events:
        if trial not in live:
            continue
        if kind == "fail":
            scheduler.on_trial_error(None, live[trial])
            scheduler.on_trial_add(None, live[trial])
            decision = "RETRY"
        else:
            report = result(*rest)
            decision = "STOP" if kind == "end" else scheduler.on_trial_result(None, live[trial], report)
            if decision == "STOP":  # Like TuneController.stop_trial.
                scheduler.on_trial_complete(None, live.pop(trial), report)
        taken.append([trial, kind, *rest[:1], *map(number, rest[1:])])
        decisions.append(decision)
        rungs = [(rung, bracket) for bracket in scheduler._brackets for rung in reversed(bracket._rungs)]
        cutoffs.append([number(bracket.cutoff(recorded)) for (_, recorded), bracket in rungs])
    times = [time for bracket in scheduler._brackets for time, _ in reversed(bracket._rungs)]
    return {"name": name, "scheduler": "asha", "settings": settings, "rungs": times,
            "brackets": drawn_into, "events": taken, "decisions": decisions, "cutoffs": cutoffs, "status": scheduler.debug_string().split("\n")}


class Controller:
    """The part of TuneController that the median rule uses."""

    def get_live_trials(self):
        return []


def median(name, events, mode="max", **settings):
    rule = MedianStoppingRule("training_iteration", "m", mode, **settings)
    live, taken, decisions = {}, [], []
    for trial in sorted({event[0] for event in events}):
        live[trial] = Trial(trial)
    for trial, kind, *rest in events:
        if trial not in live:
            continue
        report = result(*rest)
        decision = "STOP" if kind == "end" else rule.on_trial_result(Controller(), live[trial], report)
        if decision == "STOP":
            rule.on_trial_complete(Controller(), live.pop(trial), report)
        taken.append([trial, kind, *rest[:1], *map(number, rest[1:])])
        decisions.append(decision)
    return {"name": name, "scheduler": "median_stopping", "settings": {"mode": mode, **settings},
            "events": taken, "decisions": decisions, "status": [rule.debug_string()]}


class Workers:
    """The part of TuneController that PBT uses."""

    search_alg = None

    def __init__(self, trials):
        self.trials = trials

    def get_trials(self):
        return self.trials

    def _schedule_trial_save(self, trial, result):
        return trial.trial_id, result["training_iteration"]

    def pause_trial(self, trial, should_checkpoint):
        trial.status = "PAUSED"


class Member(Trial):
    """A trial that can be cloned."""

    status = "PENDING"

    def __init__(self, name):
        super().__init__(name)
        self.config, self.evaluated_params, self.iteration = {"lr": 1}, {}, 0
        manager = types.SimpleNamespace(checkpoint_config=types.SimpleNamespace(num_to_keep=None))
        self.run_metadata = types.SimpleNamespace(checkpoint_manager=manager)

    def is_finished(self):
        return False

    def set_config(self, config):
        self.config = config

    def set_experiment_tag(self, tag):
        self.experiment_tag = tag


def population(seed):
    """Replaces as many trials as there are best ones: one, so that the donor does not depend on chance."""
    draw = random.Random(seed)
    count, interval, mode = draw.randint(3, 4), draw.choice([1, 2, 3]), draw.choice(["max", "min"])
    settings = dict(perturbation_interval=interval, burn_in_period=draw.choice([0, 4]), quantile_fraction=.25)
    pbt = PopulationBasedTraining("training_iteration", "m", mode, hyperparam_mutations={"lr": [1, 2]}, log_config=False,
                                  **settings)
    trials = [Member(number) for number in range(count)]
    workers, slots = Workers(trials), draw.choice([count, count, 2])
    for trial in trials:
        pbt.on_trial_add(workers, trial)
    events, decisions = [], []
    while len(events) < 80:
        while sum(trial.status == "RUNNING" for trial in trials) < slots:
            chosen = pbt.choose_trial_to_run(workers)
            if chosen.status == "PAUSED":
                events.append([chosen.trial_id, "resume"])
                decisions.append("RESUME")
            chosen.status = "RUNNING"
        trial = draw.choice([trial for trial in trials if trial.status == "RUNNING"])
        trial.iteration += 1
        score = NAN if draw.random() < .03 else round(draw.random() + trial.iteration / 10, 2)
        waits = any(other.status in ("PENDING", "PAUSED") for other in trials)
        saves, exploits = pbt._num_checkpoints, pbt._num_perturbations
        decision = pbt.on_trial_result(workers, trial, result(trial.iteration, score))
        if pbt._num_perturbations > exploits:
            donor, iteration = trial.run_metadata.checkpoint_manager._latest_checkpoint_result.checkpoint
            events.append([trial.trial_id, "report", trial.iteration, number(score), waits])
            decisions.append(f"EXPLOIT {donor} AT {iteration}")
            trial.iteration, trial.status = iteration, "RUNNING"
            continue
        events.append([trial.trial_id, "report", trial.iteration, number(score), waits])
        if decision == "PAUSE":
            trial.status = "PAUSED"
        elif pbt._num_checkpoints > saves:
            decision = "SAVE"
        decisions.append(decision)
    return {"name": f"population {seed}", "scheduler": "pbt", "settings": {"mode": mode, **settings}, "trials": count,
            "events": events, "decisions": decisions, "status": [pbt.debug_string()]}


def quantiles(scores, fraction, mode):
    """The worst and the best of a population."""
    pbt = PopulationBasedTraining(metric="m", mode=mode, hyperparam_mutations={"lr": [1, 2]}, quantile_fraction=fraction)
    trials = {}
    for index, score in enumerate(scores):
        trial = Trial(index)
        trial.config, trial.evaluated_params, trial.is_finished = {"lr": 1}, {}, lambda: False
        pbt._trial_state[trial] = _PBTTrialState(trial)
        pbt._trial_state[trial].last_score = None if score is None else pbt._metric_op * score
        trials[index] = trial
    lower, upper = pbt._quantiles()
    return {"scores": [number(score) for score in scores], "fraction": fraction, "mode": mode,
            "lower": [trial.trial_id for trial in lower], "upper": [trial.trial_id for trial in upper]}


def reports(rows):
    return [[trial, "report", time, value] for trial, time, value in rows]


def named():
    letters = "abcdefgh"
    two = dict(reduction_factor=2, max_t=8)
    yield asha("S1", reports(zip(letters, [1] * 8, [.05, .06, .04, .12, .11, .03, .13, .12])))
    yield asha("S2", reports([(n, 1, .5 - .1 * i) for i, n in enumerate("abcde")]), **two)
    yield asha("S2 ascending", reports([(n, 1, .1 + .1 * i) for i, n in enumerate("abcde")]), **two)
    curves = dict(a=(.9, .5), b=(.5, .9), c=(.7, .6), d=(.6, .95))
    yield asha("S3", reports([(n, t, round(curves[n][0] * curves[n][1] ** t, 6)) for t in range(1, 9) for n in "abcd"]),
               mode="min", **two)
    yield asha("S4", reports([(n, t, v + t / 100) for t in range(1, 10) for n, v in zip("abc", (.1, .2, .3))]),
               grace_period=2, max_t=9, reduction_factor=3)
    yield asha("S5", reports([("a", 1, NAN), ("b", 1, .5), ("c", 1, NAN), ("d", 1, .4), ("e", 1, None), ("e", 2, .6),
                              ("f", 1, INF), ("g", 1, .5), ("h", 1, -INF), ("a", 2, NAN)]), **two)
    for stop in (True, False):
        last = dict(stop_last_trials=stop)
        yield asha(f"S6 {stop}", reports([("a", t, .9) for t in (1, 2, 4, 8)] + [("b", 5, .8), ("c", 3, .95)]), max_t=16,
                   reduction_factor=2, **last)
        yield asha(f"S7 {stop}", reports([("a", t, .5) for t in (1, 2, 4, 8, 9)] + [("b", 1, .4)]
                                         + [("c", t, .6) for t in (1, 2, 4, 7, 9, 10)]), **last, **two)
    yield asha("S8", reports([(n, 1, .5) for n in "abcd"] + [("e", 1, .499)]), reduction_factor=4, max_t=16)
    yield asha("S9", [["a", "report", 1, .5], ["b", "end", 1, .9], ["c", "report", 1, .6], ["d", "report", 1, .7]], **two)
    yield asha("S10", [["a", "report", 1, .5], ["b", "report", 1, .6], ["b", "fail"], ["b", "report", 1, .1],
                       ["b", "report", 2, .1], ["a", "report", 2, .2], ["c", "report", 1, .55]], **two)
    for max_t, factor in ((100, 4), (1000, 10), (243, 3), (10 ** 6, 10), (10, 2)):
        yield asha(f"R1 {max_t}/{factor}", [], max_t=max_t, reduction_factor=factor)
    yield median("M1", reports([("a", t, v) for t, v in enumerate((.1, .2, .3, .4), 1)]
                               + [("b", t, v) for t, v in enumerate((.2, .4, .5, .6), 1)]
                               + [("d", t, v) for t, v in enumerate((.0, .25), 1)]
                               + [("c", t, v) for t, v in enumerate((.5, .1, .1, .1), 1)]),
                 grace_period=2, min_samples_required=2)


def drawn(kind, seed):
    """Trials that report in a random order; some end by themselves, fail, or report NaN, infinity or nothing."""
    draw = random.Random(seed)
    count, longest = draw.randint(4, 12), draw.choice([8, 9, 16, 27])
    ends = {trial: draw.randint(1, longest) for trial in range(count) if draw.random() < .2}
    level = [draw.random() for _ in range(count)]
    time, live, events = [0] * count, list(range(count)), []
    while live:
        trial = draw.choice(live)
        time[trial] += 1
        value = round(level[trial] * (1 - .7 ** time[trial]) + draw.choice([0, 0, .05, -.05]), 3)
        odd = draw.random()
        if kind == "asha" and odd < .03:
            events.append([trial, "fail"])
        if odd > .97:
            value = draw.choice({"median": [value], "odd median": [NAN, INF, -INF, None]}.get(kind, [NAN, INF, None]))
        is_last = time[trial] == ends.get(trial, longest)
        events.append([trial, "end" if is_last and trial in ends and value == value and value is not None else "report",
                       time[trial], value])
        if is_last:
            live.remove(trial)
    mode = draw.choice(["max", "min"])
    if "median" in kind:
        return median(f"drawn {seed}", events, mode, grace_period=draw.choice([1, 2, 3]),
                      min_samples_required=draw.choice([1, 2, 3]))
    return asha(f"drawn {seed}", events, mode=mode, max_t=longest, reduction_factor=draw.choice([2, 3, 4]),
                grace_period=draw.choice([1, 2]), stop_last_trials=draw.random() < .8,
                **(dict(brackets=2) if kind == "brackets" else {}))


def main():
    sequences = list(named())
    sequences += [drawn("asha", seed) for seed in range(24)]
    sequences += [drawn("median", seed) for seed in range(100, 108)]
    sequences += [drawn("odd median", seed) for seed in range(200, 216)]
    sequences += [drawn("brackets", seed) for seed in range(300, 308)]
    sequences += [population(seed) for seed in range(400, 416)]
    draw = random.Random(7)
    populations = []
    for size in (1, 2, 3, 4, 5, 8, 13):
        for fraction in (.25, .5, .1):
            scores = [round(draw.random(), 3) for _ in range(size)]
            populations.append(quantiles(scores, fraction, draw.choice(["max", "min"])))
    populations.append(quantiles([.1, NAN, .3, None, .2, .9], .25, "max"))
    print(json.dumps({"ray": "2.60.0", "sequences": sequences, "populations": populations}, allow_nan=False))


main()
