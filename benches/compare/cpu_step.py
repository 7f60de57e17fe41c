#!/usr/bin/env python3
"""Measures training steps of the models of `benches/cpu_step.rs` with PyTorch, in turns with that program.

    cargo bench -p accelerator-benches --bench cpu_step --no-run      # prints the program's path
    tests/trainer/install
    target/trainer-venv/bin/python benches/compare/cpu_step.py target/release/deps/cpu_step-…

Prints the median milliseconds of each side, and the median of its ratios to PyTorch in the same round.
"""

import argparse
import os
import subprocess
import sys
import time
from statistics import median

ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TOP_PAD_": "67108864",
    "MALLOC_TRIM_THRESHOLD_": "4294967296",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}


def train(o):
    import torch
    import torch.nn.functional as F
    from torch import nn

    torch.set_num_threads(o.threads)

    class Cnn(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.conv2 = nn.Conv2d(1, 32, 3), nn.Conv2d(32, 64, 3)
            self.dense1, self.dense2 = nn.Linear(9216, 128), nn.Linear(128, 10)

        def forward(self, x):
            x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
            x = F.dropout(x, o.dropout).flatten(1)
            return self.dense2(F.dropout(F.relu(self.dense1(x)), o.dropout))

    class Transformer(nn.Module):
        def __init__(self):
            super().__init__()
            layer = nn.TransformerEncoderLayer(64, 4, 256, o.dropout, "gelu", batch_first=True)
            self.tokens, self.places = nn.Embedding(1024, 64), nn.Embedding(32, 64)
            self.encoder, self.output = nn.TransformerEncoder(layer, 2), nn.Linear(64, 10)

        def forward(self, tokens):
            x = self.encoder(self.tokens(tokens) + self.places.weight)
            return self.output(x.mean(1))

    class Mlp(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.third = nn.Linear(784, 1024), nn.Linear(1024, 1024), nn.Linear(1024, 10)

        def forward(self, x):
            x = F.dropout(F.relu(self.first(x)), o.dropout)
            return self.third(F.dropout(F.relu(self.second(x)), o.dropout))

    model, batch, x = {
        "cnn": lambda: (Cnn(), 64, torch.randn(64, 1, 28, 28)),
        "transformer": lambda: (Transformer(), 16, torch.randint(1024, (16, 32))),
        "mlp": lambda: (Mlp(), 128, torch.randn(128, 784)),
    }[o.model]()
    targets = torch.arange(batch) % 10
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    steps = []
    for _ in range(o.steps + 5):
        start = time.perf_counter()
        F.cross_entropy(model(x), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        steps.append((time.perf_counter() - start) * 1e3)
    print(median(steps[5:]))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", nargs="?", help="the program of benches/cpu_step.rs")
    parser.add_argument("--models", default="cnn,transformer,mlp")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.model:
        return train(options)
    common = ["--dropout", str(options.dropout), "--threads", str(options.threads), "--steps", str(options.steps)]
    environment = {**os.environ, **ALLOCATOR, "RAYON_NUM_THREADS": str(options.threads)}
    for model in options.models.split(","):
        sides = {"PyTorch": [sys.executable, __file__, "--model", model, *common]}
        for layers in ("burn", "ops"):
            sides[layers] = [options.program, "--train", "--model", model, "--layers", layers, *common]
        found = {side: [] for side in sides}
        for _ in range(options.rounds):
            for side, command in sides.items():
                run = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
                found[side].append(float(run.stdout))
        for side, steps in found.items():
            ratio = median(step / first for step, first in zip(steps, found["PyTorch"]))
            print(f"{model:>12}  {side:>8}  {median(steps):8.2f} ms  {ratio:.2f}", flush=True)


main()
