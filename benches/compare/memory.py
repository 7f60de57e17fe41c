#!/usr/bin/env python3
"""Measures the peak memory and the step time of a transformer in PyTorch, plain and with its layers recomputed, and, with
several ranks, sharded as well.

    tests/trainer/install
    target/trainer-venv/bin/python benches/compare/memory.py [--length 512] [--ranks 2] …

Takes the options of `benches/memory.rs` and trains the same model: token and position embeddings, pre-norm encoder
layers with a causal mask, GELU and no dropout, and a linear layer. Prints one JSON object for each mode, which runs in
its own process, or in one per rank, over gloo: by `DistributedDataParallel`, or by FSDP2 (`fully_shard`) with its layers
recomputed. Layers are recomputed by `torch.utils.checkpoint` with `use_reentrant=False`. Prints the largest memory and time
of a rank.
"""

import argparse
import json
import os
import resource
import socket
import subprocess
import sys
import time
from statistics import median

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
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
        self.again = o.units in ("recompute", "shard")
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


def distributed(model, o):
    if o.ranks == 1:
        return model
    torch.distributed.init_process_group("gloo")
    if o.units != "shard":
        return nn.parallel.DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (o.ranks,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(o):
    torch.manual_seed(0)
    before = resident()
    model = distributed(Transformer(o), o)
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
    if o.ranks > 1:
        torch.distributed.destroy_process_group()


def job(units, ranks):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    if ranks > 1:
        place["OMP_NUM_THREADS"] = "1"
    runs = [
        subprocess.Popen(
            [sys.executable, *sys.argv, "--units", units],
            env={**os.environ, **place, "RANK": str(rank)},
            stdout=subprocess.PIPE,
        )
        for rank in range(ranks)
    ]
    found = [json.loads(run.communicate()[0]) for run in runs]
    return {name: max(result[name] for result in found) for name in found[0]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in [("tokens", 64), ("width", 256), ("heads", 4), ("layers", 12), ("batch", 8), ("length", 64),
                          ("parts", 1), ("steps", 4), ("rounds", 5), ("ranks", 1)]:
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--units", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.units:
        train(options)
        return
    ways = ["plain", "recompute"] + ["shard"] * (options.ranks > 1)
    results = {units: [] for units in ways}
    for _ in range(options.rounds):
        for units, found in results.items():
            found.append(job(units, options.ranks))
    for units, found in results.items():
        medians = {name: median(result[name] for result in found) for name in found[0]}
        print(json.dumps({"units": units, **medians}))


main()
