#!/usr/bin/env python3
"""Compares ASHA with random search, which trains every trial to its end: iterations, and the best accuracy.

    cargo build --release --example tune_mnist
    python3 benches/compare/asha.py target/release/examples/tune_mnist --data-dir mnist

For each seed, both get the same configurations, and run two trials at a time in an order that does not depend on
timing. A ratio is the iterations over those of random search; an accuracy is the best of any iteration of any trial.
"""

import argparse
import csv
import pathlib
import statistics
import subprocess
import tempfile

FORMS = ("asha", "asha-promotion")


def search(args, seed, scheduler):
    """The iterations of all trials, and the best accuracy."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "--data-dir": args.data_dir, "--num-samples": args.num_samples, "--max-iterations": args.max_iterations,
            "--limit": args.limit, "--grace-period": args.grace_period, "--reduction-factor": args.reduction_factor,
            "--slots": 2, "--ordered": 2, "--seed": seed, "--scheduler": scheduler, "--out": folder,
        }
        flags = [str(part) for name, value in settings.items() for part in (name, value)]
        subprocess.run([args.example, *flags], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        with open(pathlib.Path(folder, "result.csv"), newline="") as file:
            rows = list(csv.DictReader(file))
    assert len(rows) == args.num_samples, f"{len(rows)} trials instead of {args.num_samples}"
    return sum(int(row["training_iteration"]) for row in rows), max(float(row["best_mean_accuracy"]) for row in rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("example", help="examples/tune_mnist.rs, built")
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--num-samples", type=int, default=64)
    parser.add_argument("--max-iterations", type=int, default=32)
    parser.add_argument("--limit", type=int, default=512)
    parser.add_argument("--grace-period", type=int, default=4)
    parser.add_argument("--reduction-factor", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    found = {form: [] for form in FORMS}
    for seed in range(args.seeds):
        iterations, accuracy = search(args, seed, "fifo")
        line = f"seed {seed}: random {iterations} iterations, best {accuracy:.4f}"
        for form in FORMS:
            its, best = search(args, seed, form)
            found[form].append((its / iterations, best - accuracy))
            line += f"; {form} {its}, ratio {its / iterations:.3f}, best {best:.4f}"
        print(line, flush=True)
    for form, pairs in found.items():
        ratio, change = (statistics.median(column) for column in zip(*pairs))
        reached = sum(change >= 0 for _, change in pairs)
        print(f"{form}: median ratio {ratio:.3f}, best accuracy {change:+.4f}, reached in {reached} of {args.seeds} seeds")


main()
