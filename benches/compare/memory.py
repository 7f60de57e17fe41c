#!/usr/bin/env python3
"""Measures the peak memory and the step time of a transformer in PyTorch, plain and with its layers recomputed.

    tests/trainer/install
    target/trainer-venv/bin/python benches/compare/memory.py [--length 512] …

Takes the options of `benches/memory.rs` and trains the same model: token and position embeddings, pre-norm encoder
layers with a causal mask, GELU and no dropout, and a linear layer. Prints one JSON object for each mode, which runs in
its own process. Layers are recomputed by `torch.utils.checkpoint` with `use_reentrant=False`.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from statistics import median

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class Transformer(nn.Module):
    def __init__(self, o):
        super().__init__()
        self.tokens = nn.Embedding(o.tokens, o.width)
        self.places = nn.Embedding(o.length, o.width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                o.width, o.heads, 4 * o.width, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(o.layers)
        )
        self.head = nn.Linear(o.width, o.tokens)
        self.again = o.units == "recompute"
        self.parts = o.parts

    def part(self, x, following):
        return F.cross_entropy(self.head(x), following, reduction="sum")

    def forward(self, tokens, following):
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        for layer in self.layers:
            if self.again:
                x = checkpoint(layer, x, mask, is_causal=True, use_reentrant=False)
            else:
                x = layer(x, mask, is_causal=True)
        x = x.flatten(0, 1)
        total = 0.0
        for part in zip(x.chunk(self.parts), following.chunk(self.parts)):
            total += checkpoint(self.part, *part, use_reentrant=False) if self.again else self.part(*part)
        return total / x.shape[0]


def resident():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def train(o):
    torch.manual_seed(0)
    before = resident()
    model = Transformer(o)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    rows = o.batch * o.length
    stream = torch.tensor([at * 7919 % 104729 % o.tokens for at in range(rows + 1)])
    tokens, following = stream[:-1].view(o.batch, o.length), stream[1:]
    steps = []
    for _ in range(o.steps):
        start = time.perf_counter()
        loss = model(tokens, following)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        steps.append(time.perf_counter() - start)
    print(json.dumps({"resident": resident() - before, "step": median(steps[1:]), "loss": loss.item()}))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in [("tokens", 64), ("width", 256), ("heads", 4), ("layers", 12), ("batch", 8), ("length", 64),
                          ("parts", 1), ("steps", 4), ("rounds", 5)]:
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--units", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.units:
        train(options)
        return
    results = {"plain": [], "recompute": []}
    for _ in range(options.rounds):
        for units, found in results.items():
            run = subprocess.run([sys.executable, *sys.argv, "--units", units], check=True, capture_output=True)
            found.append(json.loads(run.stdout))
    for units, found in results.items():
        medians = {name: median(result[name] for result in found) for name in found[0]}
        print(json.dumps({"units": units, **medians}))


main()
