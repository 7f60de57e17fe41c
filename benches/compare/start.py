#!/usr/bin/env python3
"""Compares how long accel-launch and torchrun take from their start on two hosts to the first all-reduce of all ranks.

    cargo build --release -p accel-launch
    cargo build --release -p burn-accelerate-collective --example first_all_reduce
    PYTHON=/path/to/venv/bin/python benches/compare/start.py

The hosts are network namespaces of this machine, joined by an Ethernet pair, so this needs Linux, root and iproute2.
torchrun comes with the Python that has torch; without one, only accel-launch is timed. The sides take turns, round
after round: each starts its two launchers at once, with two ranks each, and every rank all-reduces one number.
Times are medians over the rounds, in milliseconds:

  all       from the start of the commands to the end of the slowest rank's all-reduce
  launch    from the start of the commands to the first line of the slowest rank's program
  import    the time of `import torch` on the slowest rank
  meet      from the time when the slowest rank asks for the others to the end of its all-reduce
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
ROOT = HERE.parents[1]
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "release"
LIMIT = 120


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", type=int, default=2, help="of each host [2]")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    python = os.environ.get("PYTHON", sys.executable)
    sides = {"accel-launch": ours}
    if subprocess.run([python, "-c", "import torch.distributed.run"], capture_output=True).returncode == 0:
        sides["torchrun c10d"] = lambda *place: torchrun(python, "c10d", *place)
        sides["torchrun static"] = lambda *place: torchrun(python, "static", *place)
    else:
        print(f"left out: torchrun ({python} has no torch; set PYTHON=...)", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder, Hosts(Path(folder)) as hosts:
        rounds = []
        # The first round reads programs from the disk, and does not count.
        for number in range(options.rounds + 1):
            at = 29400 + number * len(sides)
            times = {name: hosts.run(side, at + nth, options.ranks) for nth, (name, side) in enumerate(sides.items())}
            totals = ", ".join(f"{name} {1e3 * of['all']:.0f} ms" for name, of in times.items())
            print(f"round {number}: load {os.getloadavg()[0]:.1f}, {totals}", file=sys.stderr, flush=True)
            rounds.append(times)
    medians = {
        name: {what: statistics.median(times[name][what] for times in rounds[1:]) for what in rounds[0][name]}
        for name in sides
    }
    if options.json:
        print(json.dumps(medians))
        return
    print(f"{'':16}{''.join(what.rjust(10) for what in medians['accel-launch'])}")
    for name, times in medians.items():
        print(f"{name:16}{''.join(f'{1e3 * seconds:.0f} ms'.rjust(10) for seconds in times.values())}")


def ours(host, port, ranks):
    launcher = os.environ.get("ACCEL_LAUNCH", TARGET / "accel-launch")
    place = ["--nnodes", "2", "--node-rank", str(host), "--nproc-per-node", str(ranks)]
    return [launcher, "--quiet", *place, "--rdzv-endpoint", f"{address(0)}:{port}", TARGET / "examples/first_all_reduce"]


def torchrun(python, backend, host, port, ranks):
    place = ["--nnodes", "2", "--node-rank", str(host), "--nproc-per-node", str(ranks), "--local-addr", address(host)]
    meeting = ["--rdzv-backend", backend, "--rdzv-endpoint", f"{address(0)}:{port}", "--rdzv-id", str(port)]
    if backend == "c10d":
        # The names of this machine do not resolve to addresses in its namespaces.
        meeting += ["--rdzv-conf", f"is_host={int(host == 0)}"]
    else:
        meeting = [*meeting[:2], "--master-addr", address(0), "--master-port", str(port)]
    return [python, "-m", "torch.distributed.run", *place, *meeting, HERE / "gloo_first_all_reduce.py"]


def address(host):
    return f"10.79.0.{host + 1}"


class Hosts:
    """Two network namespaces, each with its own network configuration files."""

    def __init__(self, folder):
        self.folder = folder
        self.names = [f"start{os.getpid()}-{host}" for host in range(2)]
        self.token = folder / "token"
        self.token.touch(0o600)
        self.token.write_text(os.urandom(32).hex())

    def __enter__(self):
        try:
            for name in self.names:
                ip("netns", "add", name)
            first, second = self.names
            ip("link", "add", "eth0", "netns", first, "type", "veth", "peer", "name", "eth0", "netns", second)
            for host, name in enumerate(self.names):
                ip("-n", name, "link", "set", "lo", "up")
                ip("-n", name, "address", "add", f"{address(host)}/24", "dev", "eth0")
                ip("-n", name, "link", "set", "eth0", "up")
                own = Path("/etc/netns") / name
                own.mkdir(parents=True)
                # torchrun looks up host names, and there is no name server to wait for.
                known = f"127.0.0.1 localhost\n{address(host)} {socket.gethostname()}\n{address(1 - host)} other\n"
                (own / "hosts").write_text(known)
                (own / "resolv.conf").write_text("")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)

    def run(self, side, port, ranks):
        """The seconds of each part of one start on both hosts."""
        times = Path(tempfile.mkdtemp(dir=self.folder))
        environment = os.environ | {"ACCEL_TOKEN_FILE": str(self.token), "GLOO_SOCKET_IFNAME": "eth0"}
        commands = [["ip", "netns", "exec", name, *side(host, port, ranks), times] for host, name in enumerate(self.names)]
        with open(times / "log", "w") as log:
            start = time.time()
            running = [subprocess.Popen(command, env=environment, stdout=log, stderr=log) for command in commands]
            try:
                codes = [process.wait(LIMIT) for process in running]
            finally:
                for process in running:
                    process.terminate()
        if any(codes):
            sys.exit(f"{commands[0]} ended with {codes}: {(times / 'log').read_text()}")
        found = [[float(word) for word in (times / str(rank)).read_text().split()] for rank in range(2 * ranks)]
        return {
            "all": max(ended for _, _, ended in found) - start,
            "launch": max(began for began, _, _ in found) - start,
            "import": max(asked - began for began, asked, _ in found),
            "meet": max(ended for _, _, ended in found) - max(asked for _, asked, _ in found),
        }


def ip(*words):
    subprocess.run(["ip", *words], check=True)


if __name__ == "__main__":
    main()
