"""All-reduces (sums) of f32 with torch.distributed over gloo, timed as `accel-launch bench
all-reduce` times its own: see launcher/src/commands/bench/README.md. Started by all_reduce.py, once per rank,
with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set.

gloo_all_reduce.py WARMUP BYTES:ITERATIONS...
"""

import json
import statistics
import sys
import time

import torch
import torch.distributed as dist

BLOCKS = 100


def sample(length, iterations, warmup):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    values = torch.empty(length)

    def check():
        """Sums known values, and compares every sum."""
        indices = torch.arange(length, dtype=torch.int32)
        values.copy_((indices + rank).remainder(7))
        dist.all_reduce(values)
        expected = sum((indices + other).remainder(7).float() for other in range(ranks))
        if not torch.equal(values, expected):
            raise SystemExit(f"rank {rank}: a sum is wrong")

    for _ in range(warmup):
        check()
    values.zero_()
    dist.all_reduce(values)
    times = []
    blocks = min(BLOCKS, iterations)
    for block in range(blocks):
        operations = iterations * (block + 1) // blocks - iterations * block // blocks
        start = time.perf_counter()
        for _ in range(operations):
            dist.all_reduce(values)
        times.append((time.perf_counter() - start) / operations)
    check()
    slowest = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return statistics.median(slowest.tolist())


def main():
    dist.init_process_group("gloo")
    warmup = int(sys.argv[1])
    for size in sys.argv[2:]:
        size, iterations = map(int, size.split(":"))
        seconds = sample(size // 4, iterations, warmup)
        if dist.get_rank() == 0:
            print(json.dumps({"bytes": size, "seconds": seconds}), flush=True)
    dist.destroy_process_group()


main()
