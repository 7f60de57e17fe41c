#!/usr/bin/env python3
"""Measures how many samples per second Hugging Face's Trainer trains on, with a small transformer on this machine's CPU.

    tests/trainer/install
    target/trainer-venv/bin/python benches/compare/trainer.py [--processes 2] [--steps 200] [--batch 16] [--threads 1]

Prints one JSON object. The model classifies 16 classes in f32: embeddings of 1024 tokens and of 32 positions, both 64
wide, two encoder layers (4 heads, 256 inner, GELU, normalised after each part, no dropout), the mean over positions,
and a linear layer. It trains with AdamW at a rate falling from 1e-3 to 0, with norms clipped at 1, and logs and saves
nothing. DDP reduces gradients over gloo. Each process reads its samples in order. The first steps are not timed.
`benches/src/bin/trainer_steps.rs` does the same with our Trainer.
"""

import argparse
import json
import os
import socket
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

TOKENS, PLACES, WIDTH, HEADS, INNER, LAYERS, CLASSES = 1024, 32, 64, 4, 256, 2, 16
WARMUP = 20


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200, help=f"that count, after {WARMUP} that do not [200]")
    parser.add_argument("--batch", type=int, default=16, help="samples of each process a step [16]")
    parser.add_argument("--threads", type=int, default=1, help="of each process [1]")
    options = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(train, (options, port, folder), nprocs=options.processes)
        print((Path(folder) / "result.json").read_text())


def train(rank, options, port, folder):
    os.environ |= {"OMP_NUM_THREADS": str(options.threads), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if options.processes > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(options.processes)}
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    clock = Clock()
    model = Classifier()
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            ddp_backend="gloo" if options.processes > 1 else None,
            ddp_find_unused_parameters=False if options.processes > 1 else None,
            per_device_train_batch_size=options.batch,
            max_steps=WARMUP + options.steps,
            learning_rate=1e-3,
            optim="adamw_torch",
            train_sampling_strategy="sequential",
            dataloader_pin_memory=False,
            remove_unused_columns=False,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=sequences(options.batch * options.processes * 100),
        callbacks=[clock],
    )
    # Only the result is printed.
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    if rank == 0:
        seconds = clock.ended - clock.started
        result = {
            "side": f"transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}, gloo",
            "processes": options.processes,
            "threads": options.threads,
            "batch": options.batch,
            "steps": options.steps,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "step_ms": 1e3 * seconds / options.steps,
            "samples_per_second": options.steps * options.batch * options.processes / seconds,
        }
        (Path(folder) / "result.json").write_text(json.dumps(result))
    if options.processes > 1:
        torch.distributed.destroy_process_group()


class Clock(TrainerCallback):
    """The ends of the last untimed step and of the last step. Ranks meet in the all-reduce of each step."""

    def on_step_end(self, args, state, control, **_):
        if state.global_step == WARMUP:
            self.started = time.perf_counter()
        self.ended = time.perf_counter()


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, INNER, dropout=0.0, activation="gelu", batch_first=True)
        self.tokens, self.places = nn.Embedding(TOKENS, WIDTH), nn.Embedding(PLACES, WIDTH)
        self.encoder = nn.TransformerEncoder(layer, LAYERS)
        self.output = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens, labels):
        logits = self.output(self.encoder(self.tokens(tokens) + self.places.weight).mean(1))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def sequences(count):
    """Sequences whose tokens reveal their class: token t of sample i is (i mod 16) + 16 ((7 i + 3 t) mod 64)."""
    token = lambda sample, place: sample % CLASSES + CLASSES * ((7 * sample + 3 * place) % (TOKENS // CLASSES))
    tokens = [torch.tensor([token(sample, place) for place in range(PLACES)]) for sample in range(count)]
    return [{"tokens": row, "labels": sample % CLASSES} for sample, row in enumerate(tokens)]


if __name__ == "__main__":
    main()
