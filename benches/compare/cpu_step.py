#!/usr/bin/env python3
"""Measures training steps of the models of `benches/cpu_step` with PyTorch, in turns with that program.

    cargo bench -p accelerator-benches --bench cpu_step --no-run      # prints the program's path
    tests/trainer/install
    target/trainer-venv/bin/python benches/compare/cpu_step.py target/release/deps/cpu_step-…

Prints the median step time of each side in milliseconds, and the median of its ratios to PyTorch in the same round.
With `--processes 2`, each side trains on two ranks, which get equal batches. PyTorch then uses Hugging Face Accelerate
with gloo; `tests/trainer/install` also installs Accelerate.
"""

import argparse
import os
import socket
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
        def __init__(self, width, layers, length):
            super().__init__()
            layer = nn.TransformerEncoderLayer(width, 4, 4 * width, o.dropout, "gelu", batch_first=True)
            self.tokens, self.places = nn.Embedding(1024, width), nn.Embedding(length, width)
            self.encoder, self.output = nn.TransformerEncoder(layer, layers), nn.Linear(width, 10)

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

    class Convolution(nn.Sequential):
        def __init__(self, before, after, size, stride):
            convolution = nn.Conv2d(before, after, size, stride, size // 2, bias=False)
            super().__init__(convolution, nn.BatchNorm2d(after))

    class Block(nn.Module):
        def __init__(self, before, after, stride):
            super().__init__()
            self.first, self.second = Convolution(before, after, 3, stride), Convolution(after, after, 3, 1)
            self.shortcut = Convolution(before, after, 1, stride) if stride > 1 else nn.Identity()

        def forward(self, x):
            return F.relu(self.second(F.relu(self.first(x))) + self.shortcut(x))

    class Resnet(nn.Module):
        def __init__(self):
            super().__init__()
            stages = [(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)]
            blocks = [block for a, b, stride in stages for block in (Block(a, b, stride), Block(b, b, 1))]
            self.first, self.blocks, self.output = Convolution(3, 64, 3, 1), nn.Sequential(*blocks), nn.Linear(512, 10)

        def forward(self, x):
            return self.output(self.blocks(F.relu(self.first(x))).mean((2, 3)))

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.output = nn.LSTM(28, 128, batch_first=True), nn.Linear(128, 10)

        def forward(self, x):
            return self.output(F.dropout(self.lstm(x)[1][0][0], o.dropout))

    class Text(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.convolution, self.output = nn.Embedding(10000, 128), nn.Conv1d(128, 128, 3), nn.Linear(128, 10)

        def forward(self, words):
            x = F.relu(self.convolution(self.words(words).transpose(1, 2))).amax(2)
            return self.output(F.dropout(x, o.dropout))

    model, x = {
        "cnn": lambda: (Cnn(), torch.randn(64, 1, 28, 28)),
        "transformer": lambda: (Transformer(64, 2, 32), torch.randint(1024, (16, 32))),
        "mlp": lambda: (Mlp(), torch.randn(128, 784)),
        "resnet": lambda: (Resnet(), torch.randn(16, 3, 32, 32)),
        "wide-transformer": lambda: (Transformer(256, 4, 128), torch.randint(1024, (16, 128))),
        "lstm": lambda: (Recurrent(), torch.randn(32, 28, 28)),
        "text": lambda: (Text(), torch.randint(1024, (32, 64))),
    }[o.model]()
    targets = torch.arange(len(x)) % 10
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    backward = torch.Tensor.backward
    if o.processes > 1:
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        model, optimizer = accelerator.prepare(model, optimizer)
        backward = accelerator.backward
    steps = []
    for _ in range(o.steps + 5):
        start = time.perf_counter()
        backward(F.cross_entropy(model(x), targets))
        optimizer.step()
        optimizer.zero_grad()
        steps.append((time.perf_counter() - start) * 1e3)
    print(median(steps[5:]))


def run(command, environment, processes):
    """Returns the step time of the slowest rank, in milliseconds."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in range(processes):
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
        places = {name: str(place) for name, place in places.items()}
        places |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        own = {**environment, **(places if processes > 1 else {})}
        ranks.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=own))
    printed = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        sys.exit(f"a rank failed: {' '.join(command)}")
    return max(float(text) for text in printed)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", nargs="?", help="the program of benches/cpu_step")
    parser.add_argument("--models", default="cnn,transformer,mlp,resnet,wide-transformer,lstm,text")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.model:
        return train(options)
    common = ["--dropout", str(options.dropout), "--threads", str(options.threads), "--steps", str(options.steps)]
    processes = ["--processes", str(options.processes)]
    threads = dict.fromkeys(["OMP_NUM_THREADS", "RAYON_NUM_THREADS"], str(options.threads))
    environment = {**os.environ, **ALLOCATOR, **threads}
    for model in options.models.split(","):
        sides = {"PyTorch": [sys.executable, __file__, "--model", model, *common, *processes]}
        for layers in ("burn", "ops"):
            sides[layers] = [options.program, "--train", "--model", model, "--layers", layers, *common]
        found = {side: [] for side in sides}
        for _ in range(options.rounds):
            for side, command in sides.items():
                found[side].append(run(command, environment, options.processes))
        for side, steps in found.items():
            ratio = median(step / first for step, first in zip(steps, found["PyTorch"]))
            print(f"{model:>16}  {side:>8}  {median(steps):8.2f} ms  {ratio:.2f}", flush=True)


main()
