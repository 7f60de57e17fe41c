#!/usr/bin/env python3
"""Trains the networks of `accel-gpu-bench plain-and-prepared` with PyTorch, plain and through Hugging Face Accelerate.

The networks, batches, optimizer and rounds are the same; the output is one JSON object with the fields of the other
side. Two differences are defaults of PyTorch: its encoder layers use fused attention
(`scaled_dot_product_attention`), and its AdamW updates many tensors in one kernel (`foreach`).

    torch_and_accelerate.py --model transformer --precision bf16 --out transformer-bf16.json
    torch_and_accelerate.py --model cnn --precision f32 --tf32
"""

import argparse
import contextlib
import json
import math
import subprocess
import sys
import time

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

WARM_UP = 8
BURST = 3
BURSTS = 10
FEWEST = 3
BEGUN = time.perf_counter()
RATE = 1e-5
SEED = 42
ENDLESS = 1_000_000
DIFFERENT = 4096
CLASSES = 10
MIB = float(1 << 20)

BATCH_SIZES = {
    ("cnn", "full"): 1024,
    ("cnn", "tiny"): 16,
    ("transformer", "full"): 32,
    ("transformer", "tiny"): 4,
}
SHAPES = {
    "full": {"tokens": 12_288, "length": 256, "width": 512, "heads": 8, "layers": 12},
    "tiny": {"tokens": 64, "length": 16, "width": 32, "heads": 4, "layers": 2},
}


class Cnn(nn.Module):
    """PyTorch's basic MNIST example, without dropout."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.dense1 = nn.Linear(64 * 12 * 12, 128)
        self.dense2 = nn.Linear(128, CLASSES)

    def forward(self, images):
        x = functional.relu(self.conv1(images))
        x = functional.relu(self.conv2(x))
        x = functional.max_pool2d(x, 2).flatten(1)
        return self.dense2(functional.relu(self.dense1(x)))


class Transformer(nn.Module):
    """Encoder layers with a causal mask, normalised first, with GELU, without dropout."""

    def __init__(self, tokens, length, width, heads, layers):
        super().__init__()
        self.tokens = nn.Embedding(tokens, width)
        self.places = nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, tokens)

    def forward(self, tokens):
        length = tokens.shape[1]
        places = torch.arange(length, device=tokens.device)
        x = self.tokens(tokens) + self.places(places)
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        return self.head(self.encoder(x, mask=mask, is_causal=True)).flatten(0, 1)


class Numbers(Dataset):
    """The data set 0, 1, 2, …"""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return index


class Samples:
    """Makes a batch of the samples with the given numbers: noise with unrelated labels."""

    def __init__(self, model, shape):
        generator = torch.Generator().manual_seed(SEED)
        if model == "cnn":
            self.values = torch.rand(DIFFERENT, 1, 28, 28, generator=generator) * 2 - 1
            self.labels = torch.randint(CLASSES, (DIFFERENT,), generator=generator)
        else:
            self.values = None
            size = (DIFFERENT, shape["length"] + 1)
            self.labels = torch.randint(shape["tokens"], size, generator=generator)

    def __call__(self, items):
        index = torch.tensor(items) % DIFFERENT
        labels = self.labels[index]
        # Whatever a batch holds is moved to the device, so it has no placeholder for missing images.
        return {"labels": labels} if self.values is None else {"values": self.values[index], "labels": labels}


def loss_of(model, batch):
    labels = batch["labels"]
    if "values" in batch:
        return functional.cross_entropy(model(batch["values"]).float(), labels)
    logits = model(labels[:, :-1])
    return functional.cross_entropy(logits.float(), labels[:, 1:].flatten())


def adamw(model):
    """AdamW with the default settings of Burn."""
    return torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=1e-4, eps=1e-5)


class Plain:
    """The loop that users of PyTorch write by hand."""

    def __init__(self, bench):
        self.device = bench.device
        torch.manual_seed(SEED)
        self.model = bench.model().to(self.device)
        self.optimizer = adamw(self.model)
        self.batches = iter(bench.loader())
        self.half = bench.arguments.precision == "bf16"

    def step(self):
        batch = {key: value.to(self.device) for key, value in next(self.batches).items()}
        autocast = torch.autocast(self.device.type, torch.bfloat16) if self.half else contextlib.nullcontext()
        with autocast:
            loss = loss_of(self.model, batch)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss


class Prepared:
    """The loop through Accelerate."""

    def __init__(self, bench):
        from accelerate import Accelerator

        half = bench.arguments.precision == "bf16"
        self.accelerator = Accelerator(
            mixed_precision="bf16" if half else "no", cpu=bench.device.type == "cpu"
        )
        torch.manual_seed(SEED)
        model = bench.model()
        optimizer = adamw(model)
        self.model, self.optimizer, loader = self.accelerator.prepare(model, optimizer, bench.loader())
        self.batches = iter(loader)

    def step(self):
        loss = loss_of(self.model, next(self.batches))
        self.optimizer.zero_grad()
        self.accelerator.backward(loss)
        self.optimizer.step()
        return loss


class Bench:
    def __init__(self, arguments):
        self.arguments = arguments
        self.device = torch.device(arguments.device)
        self.shape = SHAPES[arguments.size]
        self.samples = Samples(arguments.model, self.shape)
        self.batch_size = arguments.batch_size or BATCH_SIZES[arguments.model, arguments.size]

    def model(self):
        return Cnn() if self.arguments.model == "cnn" else Transformer(**self.shape)

    def loader(self):
        numbers = Numbers(self.batch_size * ENDLESS)
        return DataLoader(
            numbers,
            batch_size=self.batch_size,
            num_workers=self.arguments.workers,
            collate_fn=self.samples,
        )

    def wait(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def round(self, side, steps):
        self.wait()
        start = time.perf_counter()
        for _ in range(steps):
            side.step()
        self.wait()
        return time.perf_counter() - start

    def ahead(self, side):
        started, done = [], []
        for _ in range(BURSTS):
            self.wait()
            start = time.perf_counter()
            for _ in range(BURST):
                side.step()
            started.append((time.perf_counter() - start) * 1e3)
            self.wait()
            done.append((time.perf_counter() - start) * 1e3)
        return {
            "steps": BURST,
            "started_ms": spread(started),
            "done_ms": spread(done),
            "ahead_ms": spread([b - a for a, b in zip(started, done)]),
        }

    def alone(self, make):
        """The memory that a loop needs while nothing else runs."""
        side = make(self)
        self.round(side, WARM_UP)
        if self.device.type != "cuda":
            return {"reserved_mib": None, "in_use_mib": None, "driver_mib": None}
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self.round(side, WARM_UP)
        memory = {
            "reserved_mib": torch.cuda.max_memory_reserved() / MIB,
            "allocated_mib": torch.cuda.max_memory_allocated() / MIB,
            "in_use_mib": torch.cuda.memory_allocated() / MIB,
            "driver_mib": driver(),
        }
        if isinstance(side, Prepared):
            side.accelerator.free_memory()
        del side
        torch.cuda.empty_cache()
        return memory

    def measure(self):
        arguments = self.arguments
        memory = [self.alone(Plain), self.alone(Prepared)]
        sides = [Plain(self), Prepared(self)]
        for side in sides:
            self.round(side, WARM_UP)
        step = self.round(sides[0], WARM_UP) / WARM_UP
        self.round(sides[1], WARM_UP)
        steps = max(1, math.ceil(arguments.seconds / step))
        times = [[], []]
        for turn in range(arguments.pairs):
            if turn >= FEWEST and time.perf_counter() - BEGUN > arguments.limit:
                break
            for index in (turn % 2, 1 - turn % 2):
                times[index].append(self.round(sides[index], steps) / steps)
        figures = [
            {
                "step_ms": spread([time * 1e3 for time in times[index]]),
                "samples_per_second": spread([self.batch_size / time for time in times[index]]),
                "ahead": self.ahead(side),
                "loss": side.step().item(),
                "memory": memory[index],
            }
            for index, side in enumerate(sides)
        ]
        import accelerate

        return {
            "measure": "torch_and_accelerate",
            "device": arguments.device,
            "model": arguments.model,
            "precision": arguments.precision,
            "tf32": arguments.tf32,
            "size": arguments.size,
            "batch_size": self.batch_size,
            "workers": arguments.workers,
            "torch": torch.__version__,
            "accelerate_version": accelerate.__version__,
            "parameters": sum(parameter.numel() for parameter in sides[0].model.parameters()),
            "pairs": len(times[0]),
            "steps_a_round": steps,
            "ratio": spread([new / old for old, new in zip(*times)]),
            "plain": figures[0],
            "accelerate": figures[1],
        }


def spread(numbers):
    """The median and the quartiles, by linear interpolation."""
    numbers = sorted(numbers)

    def at(share):
        place = share * (len(numbers) - 1)
        below, above = numbers[math.floor(place)], numbers[math.ceil(place)]
        return below + (above - below) * (place - math.floor(place))

    return {"lower": at(0.25), "median": at(0.5), "upper": at(0.75)}


def driver():
    """The memory in use on the first GPU by all processes, as the driver reports it, in MiB."""
    command = ["nvidia-smi", "--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        return float(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    except (OSError, subprocess.CalledProcessError, ValueError):
        return None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--model", choices=["cnn", "transformer"], required=True)
    parser.add_argument("--precision", choices=["f32", "bf16"], default="f32")
    parser.add_argument("--tf32", action="store_true", help="products of f32 matrices and convolutions in TF32")
    parser.add_argument("--size", choices=["full", "tiny"], default="full")
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument(
        "--limit",
        type=float,
        default=math.inf,
        help="stop with fewer pairs, but not with fewer than three, when the program has run for so many seconds",
    )
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--out")
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = arguments.tf32
    torch.backends.cudnn.allow_tf32 = arguments.tf32
    text = json.dumps(Bench(arguments).measure())
    print(text)
    if arguments.out:
        with open(arguments.out, "w", encoding="utf-8") as file:
            file.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
