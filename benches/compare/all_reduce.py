#!/usr/bin/env python3
"""Compares all-reduces of `accel-launch`, Open MPI and PyTorch's gloo on this host.

    cargo build --release -p accel-launch
    PYTHON=/path/to/venv/bin/python benches/compare/all_reduce.py

Compares the programs that exist here, and reports those that are missing. Installs nothing.

  accel-launch   target/release/accel-launch, or ACCEL_LAUNCH=...
  Open MPI       mpicc and mpirun on the PATH (Debian: apt install libopenmpi-dev openmpi-bin);
                 MPIRUN_FLAGS=... replaces the flags below
  gloo           a Python with torch: PYTHON=...

All sides do the same: f32 sums in place, one operation after the other, on buffers of zeros, timed in up to 100
blocks of operations. Every sum of the warm-up and of one more operation is checked. The time of a block is that of
its slowest rank, and the time of a run is the median over its blocks. The sides take turns, round after round; the
output has the median of the rounds' times, and the median of the rounds' ratios. --outside N also times our whole
processes with N and with 2N operations of each size, and subtracts.

Open MPI is started with `--bind-to core` (with `--oversubscribe` instead if there are more ranks than cores): once
with its defaults (`mpi`: shared memory on one host, and from 4 KiB on single copies between processes if the kernel
allows them), and once without such copies (`mpi-nocma`: OMPI_MCA_btl_vader_single_copy_mechanism=none). Which of the
two is faster depends on the size and the machine; the ratio is to the faster one. For root, --allow-run-as-root is
added. The ranks of gloo get OMP_NUM_THREADS = cores / ranks, like those of the launcher.
"""

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
SIZES = "4KiB,64KiB,1MiB,4MiB,25MB,100MB"
UNITS = {"": 1, "B": 1, "KB": 10**3, "KiB": 2**10, "MB": 10**6, "MiB": 2**20, "GB": 10**9, "GiB": 2**30}
# The target on two ranks: our time over the other's, at most.
AIMS = {
    4096: {"gloo": 1 / 50, "mpi": 1},
    65536: {"mpi": 1},
    2**20: {"mpi": 1},
    2**22: {"mpi": 1},
    25 * 10**6: {"gloo": 1 / 3, "mpi": 1 / 2, "bound": 0.8},
    100 * 10**6: {"mpi": 1},
}


def main():
    options = parse()
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        sides = found(options, cores, Path(folder))
        if "ours" not in sides:
            sys.exit("accel-launch was not found: cargo build --release -p accel-launch, or ACCEL_LAUNCH=...")
        print(
            f"{options.ranks} ranks on {cores} cores, {options.rounds} rounds, transport {options.transport}, "
            f"load {load()}",
            flush=True,
        )
        rounds = []
        for number in range(options.rounds):
            rounds.append({name: run() for name, run in sides.items()})
            print(f"round {number + 1}: load {load()}", file=sys.stderr, flush=True)
    results = judged(options, rounds)
    if options.outside:
        from_outside(options, str(ours()), results)
    if options.json:
        print(json.dumps({"ranks": options.ranks, "transport": options.transport, "results": results}))
    else:
        table(results)


def parse():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", "-n", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sizes", default=SIZES, help=f"with commas between them [{SIZES}]")
    parser.add_argument("--transport", default="auto", help="of ours [auto]")
    parser.add_argument("--without", action="append", default=[], choices=["mpi", "gloo"])
    parser.add_argument("--outside", type=int, default=0, metavar="N", help="time whole processes too")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    options.sizes = [size(text) for text in options.sizes.split(",")]
    return options


def size(text):
    number = text.rstrip("BKMGi ")
    unit = text[len(number) :].strip()
    if not number.isdigit() or unit not in UNITS or int(number) * UNITS[unit] % 4:
        sys.exit(f"{text!r} is no size: expected whole numbers of f32, such as 4KiB or 25MB")
    return int(number) * UNITS[unit]


def iterations(size):
    """The number of iterations that accel-launch takes by default."""
    return max(20, min(10_000, 400_000_000 // size))


def found(options, cores, folder):
    """The sides that can run here, each as a function that returns seconds (and more) by size."""
    sides = {}
    if ours().exists():
        sides["ours"] = lambda: run_ours(options, str(ours()))
    if "mpi" not in options.without:
        if shutil.which("mpicc") and shutil.which("mpirun"):
            program = folder / "mpi_all_reduce"
            subprocess.run(["mpicc", "-O3", "-o", program, HERE / "mpi_all_reduce.c"], check=True)
            sides["mpi"] = lambda: run_mpi(options, cores, str(program), {})
            plain = {"OMPI_MCA_btl_vader_single_copy_mechanism": "none"}
            sides["mpi-nocma"] = lambda: run_mpi(options, cores, str(program), plain)
        else:
            print("left out: Open MPI (no mpicc or no mpirun on the PATH)", file=sys.stderr)
    if "gloo" not in options.without:
        python = os.environ.get("PYTHON", sys.executable)
        probe = [python, "-c", "import torch.distributed as d; assert d.is_gloo_available()"]
        if subprocess.run(probe, capture_output=True).returncode == 0:
            sides["gloo"] = lambda: run_gloo(options, cores, python)
        else:
            print(f"left out: gloo ({python} has no torch with it; set PYTHON=...)", file=sys.stderr)
    return sides


def ours():
    return Path(os.environ.get("ACCEL_LAUNCH", HERE.parents[1] / "target/release/accel-launch"))


def command(options, program, sizes):
    command = [program, "bench", "all-reduce", "--json", "--num-processes", str(options.ranks)]
    command += ["--transport", options.transport]
    return command + ["--sizes", ",".join(map(str, sizes))]


def from_outside(options, program, results):
    """Adds to our results the wall-clock time of N more operations in a whole process."""
    for result in results:
        once = max(20, int(0.5 / result["seconds"]["ours"]))
        differences = []
        for _ in range(options.outside):
            times = []
            for count in (once, 2 * once):
                start = time.perf_counter()
                one = command(options, program, [result["bytes"]]) + ["--iterations", str(count)]
                output([one], os.environ)
                times.append(time.perf_counter() - start)
            differences.append((times[1] - times[0]) / once)
        result["seconds"]["outside"] = statistics.median(differences)


def run_ours(options, program):
    report = json.loads(output([command(options, program, options.sizes)], os.environ))
    return {result["bytes"]: result for result in report["results"]}


def run_mpi(options, cores, program, variables):
    fits = ["--bind-to", "core"] if options.ranks <= cores else ["--oversubscribe"]
    if os.geteuid() == 0:
        fits.append("--allow-run-as-root")
    flags = os.environ["MPIRUN_FLAGS"].split() if "MPIRUN_FLAGS" in os.environ else fits
    command = ["mpirun", *flags, "-n", str(options.ranks), program, *arguments(options)]
    return lines(output([command], os.environ | variables))


def run_gloo(options, cores, python):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    threads = str(max(1, cores // options.ranks))
    place = {"WORLD_SIZE": str(options.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    place |= {"OMP_NUM_THREADS": threads, "GLOO_SOCKET_IFNAME": "lo"}
    command = [python, str(HERE / "gloo_all_reduce.py"), *arguments(options)]
    environments = [os.environ | place | {"RANK": str(rank)} for rank in range(options.ranks)]
    return lines(output([command] * options.ranks, *environments))


def arguments(options):
    return ["5", *(f"{size}:{iterations(size)}" for size in options.sizes)]


def output(commands, *environments):
    """The output of the first process; all of them must succeed."""
    running = []
    try:
        for command, environment in zip(commands, environments):
            running.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
        said = [process.communicate(timeout=600)[0] for process in running]
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
    for process in running:
        if process.returncode != 0:
            sys.exit(f"{' '.join(process.args)} ended with {process.returncode}")
    return said[0]


def lines(text):
    results = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return {result["bytes"]: result for result in results}


def judged(options, rounds):
    results = []
    for size in options.sizes:
        times = {name: [round[name][size]["seconds"] for round in rounds] for name in rounds[0]}
        medians = {name: statistics.median(of) for name, of in times.items()}
        # Of Open MPI, the setting that is faster at this size.
        settings = [name for name in times if name.startswith("mpi")]
        others = {"mpi": min(settings, key=medians.get)} if settings else {}
        others |= {"gloo": "gloo"} if "gloo" in times else {}
        ratios = {
            other: statistics.median(own / of for own, of in zip(times["ours"], times[name]))
            for other, name in others.items()
        }
        fractions = [round["ours"][size]["bound_fraction"] for round in rounds]
        result = {"bytes": size, "seconds": medians, "ratios": ratios}
        result["bound_fraction"] = statistics.median(fractions)
        result["aims"] = {
            name: {"aim": aim, "reached": reached(result, name, aim)}
            for name, aim in (AIMS.get(size, {}) if options.ranks == 2 else {}).items()
            if name == "bound" or name in others
        }
        results.append(result)
    return results


def reached(result, name, aim):
    return result["bound_fraction"] >= aim if name == "bound" else result["ratios"][name] <= aim


def table(results):
    names = list(results[0]["seconds"])
    others = list(results[0]["ratios"])
    cells = [["bytes", *names, *(f"ours/{name}" for name in others), "of bound", "aims"]]
    for result in results:
        aims = [
            f"{'of bound >=' if name == 'bound' else f'/{name} <='} {aim['aim']:.3g} "
            f"{'reached' if aim['reached'] else 'MISSED'}"
            for name, aim in result["aims"].items()
        ]
        cells.append(
            [
                str(result["bytes"]),
                *(shown(result["seconds"][name]) for name in names),
                *(f"{result['ratios'][name]:.3f}" for name in others),
                f"{100 * result['bound_fraction']:.1f} %",
                ", ".join(aims),
            ]
        )
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    for row in cells:
        padded = [cell.rjust(width) for cell, width in zip(row[:-1], widths)]
        print("  ".join([*padded, row[-1]]).rstrip())


def shown(seconds):
    return f"{seconds * 1e6:.2f} us" if seconds < 1e-3 else f"{seconds * 1e3:.3f} ms"


def load():
    return f"{os.getloadavg()[0]:.1f}"


if __name__ == "__main__":
    main()
