#!/usr/bin/env python3
"""Writes tests/fixtures/trainer/{line,transformer,cnn}.json: trainings by Hugging Face's Trainer on the CPU.

    tests/trainer/install
    target/trainer-venv/bin/python tests/trainer/reference.py [line|transformer|cnn]…

The present files come from torch 2.15.0, transformers 5.23.0 and accelerate 1.15.0; each names its versions.
tests/fixtures/trainer/README.md describes their content. Samples are read in order. torch's default type is that of the
case, so that Hugging Face also adds up losses in it.

A plain loop trains each case once more, without repeated samples and with the same weight for every sample of an update.
If Hugging Face's numbers differ, the case also has those of the loop, as `exact`; otherwise the loop confirms them.
"""

import argparse
import contextlib
import io
import itertools
import json
import logging
import math
import os
import socket
import tempfile
from pathlib import Path

import accelerate
import torch
import torch.distributed
import torch.multiprocessing
import torch.nn.functional as F
import transformers
from torch import nn
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments

from problems import PROBLEMS, TOKENS, Tokens, burn_parameters

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures/trainer"
PRECISIONS = {"f32": torch.float32, "f64": torch.float64}
# The bounds, by precision, within which the plain loop and Hugging Face's Trainer agree.
TOLERANCES = {"f32": 2e-5, "f64": 1e-10}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fixtures", nargs="*", metavar="FIXTURE", help="line, transformer or cnn [all]")
    names = parser.parse_args().fixtures or list(PROBLEMS)
    for name in names:
        if name not in PROBLEMS:
            parser.error(f"expected {', '.join(PROBLEMS)}, found {name}")
    torch.set_num_threads(1)
    FIXTURES.mkdir(exist_ok=True)
    for name in names:
        problem = PROBLEMS[name]
        fixture = problem.described() | {"cases": [recorded(problem, case) for case in problem.cases]}
        if name == "line":
            fixture["tokens"] = [recorded(problem, case) for problem in TOKENS for case in problem.cases]
        sources = {module.__name__: module.__version__.split("+")[0] for module in (torch, transformers, accelerate)}
        write(FIXTURES / f"{name}.json", {"source": sources} | fixture)


def write(path, fixture):
    """JSON with a line per key, sample and case, so that `git diff` shows changes."""
    text = lambda value: json.dumps(value, separators=(",", ":"))
    lines = []
    for key, value in fixture.items():
        if key in ("train", "eval", "parameters", "cases", "tokens"):
            many = isinstance(value, list)
            inner = map(text, value) if many else (f"{text(name)}:{text(each)}" for name, each in value.items())
            value = ",\n".join(inner).join(["[\n", "\n]"] if many else ["{\n", "\n}"])
        else:
            value = text(value)
        lines.append(f"{text(key)}:{value}")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def recorded(problem, case):
    """The case, the result of Hugging Face's Trainer, and the exact one if they differ."""
    with tempfile.TemporaryDirectory() as folder:
        given = (on_ranks if case.world_size > 1 else train)(problem, case, folder)
    result = case.described() | {"huggingface": rounded(given)}
    verdict = "not compared"
    if case.resume is None and not isinstance(problem, Tokens):
        ours = exact(problem, case, given)
        distance = max(difference(given[key], ours[key]) for key in ours)
        if distance > TOLERANCES[case.precision]:
            if not case.is_biased():
                raise SystemExit(f"{problem.name} {case.name}: the plain loop is {distance:.1e} from Hugging Face's Trainer")
            result["exact"] = rounded(ours)
        verdict = f"{distance:.1e} from the plain loop"
    print(f"{problem.name:<12} {case.name:<28} {given['steps']:4} steps, {verdict}", flush=True)
    return result


def difference(one, other):
    if isinstance(one, dict):
        assert one.keys() == other.keys(), (one, other)
        return max((difference(one[key], other[key]) for key in one), default=0.0)
    if isinstance(one, list):
        assert len(one) == len(other), (one, other)
        return max(map(difference, one, other), default=0.0)
    return abs(one - other)


def rounded(value):
    if isinstance(value, float):
        return float(f"{value:.12g}")
    if isinstance(value, dict):
        return {key: shortened(each) if key == "final" else rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return list(map(rounded, value))
    return value


def shortened(weights):
    """Rounds to nine decimals, or to 16 if there are few weights."""
    decimals = 9 if sum(map(len, weights.values())) > 100 else 16
    return {path: [round(value, decimals) for value in values] for path, values in weights.items()}


class Recorder(Trainer):
    """Keeps the values of each optimizer step."""

    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named)
        self.rates, self.losses, self.norms, self.window = [], [], [], 0.0

    def training_step(self, *arguments, **named):
        loss = super().training_step(*arguments, **named)
        self.window += loss.item()
        return loss

    def _get_grad_norm(self, *arguments, **named):
        norm = super()._get_grad_norm(*arguments, **named)
        self.rates.append(self._get_learning_rate())
        self.losses.append(self.window)
        self.norms.append(float(norm))
        self.window = 0.0
        return norm


class Saves(TrainerCallback):
    def __init__(self):
        self.steps = []

    def on_save(self, args, state, control, **_):
        self.steps.append(state.global_step)


class Lines(logging.Handler):
    """The messages of the Trainer before it trains."""

    def __init__(self):
        super().__init__()
        self.lines = []
        self.open = True

    def emit(self, record):
        line = record.getMessage()
        self.open = self.open and "Running Evaluation" not in line
        if self.open and line.startswith(("*****", "  ")):
            self.lines.append(line)


def train(problem, case, folder):
    torch.set_default_dtype(PRECISIONS[case.precision])
    given = run(problem, case, case.arguments, folder)
    if case.resume is None:
        return given
    checkpoint = f"{folder}/checkpoint-{case.resume['from']}"
    return run(problem, case, case.arguments | case.resume["arguments"], folder, checkpoint)


def run(problem, case, arguments, folder, checkpoint=None):
    transformers.utils.logging.disable_default_handler()
    lines = Lines()
    logging.getLogger("transformers").addHandler(lines)
    saves = Saves()
    callbacks = [saves] + ([EarlyStoppingCallback(**case.early_stopping)] if case.early_stopping else [])
    printed = io.StringIO()
    trainer = Recorder(
        model=problem.model(),
        args=TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            ddp_backend="gloo" if case.world_size > 1 else None,
            ddp_find_unused_parameters=False if case.world_size > 1 else None,
            report_to="none",
            disable_tqdm=True,
            log_level="info",
            remove_unused_columns=False,
            dataloader_pin_memory=False,
            train_sampling_strategy="sequential",
            **arguments,
        ),
        data_collator=collate,
        train_dataset=problem.samples(case.train, "train"),
        eval_dataset=problem.samples(case.eval, "eval") if case.eval else None,
        compute_metrics=metrics(case),
        callbacks=callbacks,
    )
    with contextlib.redirect_stdout(printed):
        trainer.train(resume_from_checkpoint=checkpoint)
    logging.getLogger("transformers").removeHandler(lines)
    state = trainer.state
    losses = torch.tensor(trainer.losses, dtype=torch.float64)
    if case.world_size > 1:
        torch.distributed.all_reduce(losses)
    timed = lambda key: key.endswith(("_runtime", "_per_second")) or key == "total_flos"
    result = {
        "steps": state.global_step,
        "epochs": state.num_train_epochs,
        "learning_rates": trainer.rates,
        "losses": (losses / case.world_size).tolist(),
        "grad_norms": trainer.norms,
        "log": [{key: value for key, value in entry.items() if not timed(key)} for entry in state.log_history],
        "saved": saves.steps,
        "checkpoints": sorted(int(path.name.split("-")[1]) for path in Path(folder).glob("checkpoint-*")),
        "banner": lines.lines,
        "printed": [line for line in printed.getvalue().splitlines() if line.startswith("{'loss'")],
        "final": problem.weights(trainer.model),
    }
    if state.best_metric is not None:
        result["best"] = {"step": state.best_global_step, "metric": state.best_metric}
    return result


def metrics(case):
    if case.metric is None:
        return None
    if case.metric == "accuracy":
        return lambda given: {"accuracy": float((given.predictions.argmax(-1) == given.label_ids).mean())}
    values = iter(case.metric_values)
    return lambda _: {case.metric: next(values)}


def collate(samples):
    return {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}


def on_ranks(problem, case, folder):
    """The result of `train` on rank 0 of several processes, joined by gloo."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    result = Path(folder) / "result.json"
    arguments = problem.name, case.name, port, folder, result
    torch.multiprocessing.spawn(rank_of, arguments, nprocs=case.world_size)
    return json.loads(result.read_text())


def rank_of(rank, problem, case, port, folder, result):
    problem = PROBLEMS[problem]
    case = next(each for each in problem.cases if each.name == case)
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(case.world_size),
        "LOCAL_WORLD_SIZE": str(case.world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    given = train(problem, case, folder)
    if rank == 0:
        result.write_text(json.dumps(given))
    torch.distributed.destroy_process_group()


def exact(problem, case, given):
    """The result if no sample is read twice in an epoch and all of an update have the same weight."""
    arguments = case.arguments
    torch.set_default_dtype(PRECISIONS[case.precision])
    model = problem.model()
    optimizer = optimizer_of(model, arguments)
    samples = problem.samples(case.train, "train")
    smoothing = arguments.get("label_smoothing_factor", 0.0)
    losses, norms, weights, evaluated = [], [], {}, {}
    measure = metrics(case)

    def loss_of(batch):
        given = model(**batch)
        return F.cross_entropy(given["logits"], batch["labels"], label_smoothing=smoothing) if smoothing else given["loss"]

    def evaluate(step):
        batch = collate(problem.samples(case.eval, "eval"))
        with torch.no_grad():
            found = {"eval_loss": loss_of(batch).item()}
            if measure:
                logits = model(**batch)["logits"]
                named = transformers.EvalPrediction(logits.numpy(), batch["labels"].numpy())
                found |= {f"eval_{name}": value for name, value in measure(named).items()}
        evaluated[step] = found
        weights[step] = problem.weights(model)

    evaluations = {entry["step"] for entry in given["log"] if "eval_loss" in entry}
    if 0 in evaluations:
        evaluate(0)
    for step, (rate, update) in enumerate(zip(given["learning_rates"], updates(case)), 1):
        loss = loss_of(collate(samples[update]))
        optimizer.zero_grad()
        loss.backward()
        limit = arguments.get("max_grad_norm", 1.0) or math.inf
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), limit).item())
        losses.append(loss.item())
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        if step in evaluations:
            evaluate(step)
    final = problem.weights(model)
    if arguments.get("load_best_model_at_end"):
        final = weights[given["best"]["step"]]
    log, last = [], 0
    for entry in given["log"]:
        step = entry["step"]
        if "loss" in entry:
            entry = entry | {"loss": sum(losses[last:step]) / (step - last), "grad_norm": norms[step - 1]}
            last = step
        elif "eval_loss" in entry:
            entry = entry | evaluated[step]
        elif "train_loss" in entry:
            entry = entry | {"train_loss": sum(losses) / step}
        log.append(entry)
    return {"losses": losses, "grad_norms": norms, "log": log, "final": final}


def updates(case):
    """The samples of each optimizer step, without end."""
    batch = case.arguments["per_device_train_batch_size"] * case.world_size
    window = batch * case.arguments.get("gradient_accumulation_steps", 1)
    end = case.train // batch * batch if case.arguments.get("dataloader_drop_last") else case.train
    epoch = [slice(start, min(end, start + window)) for start in range(0, end, window)]
    return itertools.cycle(epoch)


def optimizer_of(model, arguments):
    if arguments["optim"] == "sgd":
        return torch.optim.SGD(model.parameters())
    decayed, rest = [], []
    for path, _, parameter, _ in burn_parameters(model):
        (rest if path.endswith(("bias", "gamma", "beta")) else decayed).append(parameter)
    betas = arguments.get("adam_beta1", 0.9), arguments.get("adam_beta2", 0.999)
    groups = [{"params": decayed, "weight_decay": arguments.get("weight_decay", 0.0)}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=betas, eps=arguments.get("adam_epsilon", 1e-8))


if __name__ == "__main__":
    main()
