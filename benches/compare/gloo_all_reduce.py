"""All-reduces (sums) of f32 with torch.distributed over gloo, timed as `accel-launch bench
all-reduce` times its own: see launcher/src/commands/bench/README.md. Started by all_reduce.py, once a rank,
with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set.

gloo_all_reduce.py VALUES PERIOD WARMUP BYTES:ITERATIONS...
"""

import json
import statistics
import sys
import time

import torch
import torch.distributed as dist

# As in launcher/src/commands/bench: the stripes, the blocks.
PARTS, BLOCKS = 64, 100


def sample(length, iterations, warmup, modulus, period):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    # Element i of operation k on rank r is (i + 13k + 11r) mod VALUES: a shift of one table.
    table = torch.arange(length + modulus, dtype=torch.int32).remainder(modulus).float()
    values = torch.empty(length)

    def place(part):
        return length * part // PARTS, length * (part + 1) // PARTS

    def write(operation):
        begun = operation % period
        start, end = place(begun) if begun else (0, length)
        shift = (start + 13 * operation + 11 * rank) % modulus
        values[start:end].copy_(table[shift : shift + end - start])

    def check(operation):
        begun = operation % period
        for part in range(PARTS):
            start, end = place(part)
            again = begun - part if part <= begun else begun
            shifts = [(start + 13 * (operation - again) + 11 * other) % modulus for other in range(ranks)]
            expected = sum(table[shift : shift + end - start] for shift in shifts) * float(ranks) ** again
            if not torch.equal(values[start:end], expected):
                raise SystemExit(f"rank {rank}: the sum of operation {operation} is wrong")

    operation = 0
    for _ in range(warmup):
        write(operation)
        dist.all_reduce(values)
        check(operation)
        operation += 1
    times = []
    blocks = min(BLOCKS, iterations)
    dist.barrier()
    for block in range(blocks):
        operations = iterations * (block + 1) // blocks - iterations * block // blocks
        start = time.perf_counter()
        for number in range(operation, operation + operations):
            write(number)
            dist.all_reduce(values)
        times.append((time.perf_counter() - start) / operations)
        operation += operations
    check(operation - 1)
    slowest = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return statistics.median(slowest.tolist())


def main():
    dist.init_process_group("gloo")
    modulus, period, warmup = map(int, sys.argv[1:4])
    for size in sys.argv[4:]:
        size, iterations = map(int, size.split(":"))
        seconds = sample(size // 4, iterations, warmup, modulus, period)
        if dist.get_rank() == 0:
            print(json.dumps({"bytes": size, "seconds": seconds}), flush=True)
    dist.destroy_process_group()


main()
