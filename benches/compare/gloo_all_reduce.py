"""All-reduces (sums) of f32 with torch.distributed over gloo, timed as `accel-launch bench
all-reduce` times its own: see launcher/src/bench/README.md. Started by all_reduce.py, once a rank,
with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set.

gloo_all_reduce.py WARMUP BYTES:ITERATIONS...
"""

import json
import statistics
import sys
import time

import torch
import torch.distributed as dist

MODULUS, SHORT, OPERATIONS = 7, 16 * 1024, 100


def sample(length, iterations, warmup):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    operations = OPERATIONS if 4 * length <= SHORT else 1
    # Element i of operation k on rank r is (i + 13k + 11r) mod 7: a shift of one table.
    table = torch.arange(length + MODULUS, dtype=torch.int32).remainder(MODULUS).float()
    values = torch.empty(length)

    def write(operation):
        shift = (13 * operation + 11 * rank) % MODULUS
        values.copy_(table[shift : shift + length])

    def check(operation):
        shifts = [(13 * operation + 11 * other) % MODULUS for other in range(ranks)]
        expected = sum(table[shift : shift + length] for shift in shifts)
        if not torch.equal(values, expected):
            raise SystemExit(f"rank {rank}: the sum of operation {operation} is wrong")

    operation = 0
    for _ in range(warmup):
        write(operation)
        dist.all_reduce(values)
        check(operation)
        operation += 1
    times = []
    for _ in range(iterations):
        if operations == 1:
            write(operation)
        dist.barrier()
        start = time.perf_counter()
        if operations == 1:
            dist.all_reduce(values)
        else:
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
    for size in sys.argv[2:]:
        size, iterations = map(int, size.split(":"))
        seconds = sample(size // 4, iterations, int(sys.argv[1]))
        if dist.get_rank() == 0:
            print(json.dumps({"bytes": size, "seconds": seconds}), flush=True)
    dist.destroy_process_group()


main()
