"""The driver of a job on Ray: starts one agent (accel-launch) a node, in the bundles of a placement group.

`accel-jobs submit --engine ray` puts this file into the package of a job, and starts it with what it has to do as its
one argument (`gang.rs`), and the variables of the ranks in ACCEL_JOBS_ENV. It prints what node 0 prints, and lines that begin with RS (as in JSON text sequences): one that
begins a job, and those of other nodes. What it knows of the job it writes to a file beside Ray's log of it.
"""

import collections
import ctypes
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

RS = b"\x1e"
LOST = 75  # "a host was lost or preempted: start me again"
SETTLE = 20  # seconds in which the other agents end when one has, and in which Ray notices a lost node
GRACE = 30  # seconds that an agent may take to end after SIGTERM
LAST_LINES = 20
LIMIT = 1 << 20  # bytes of output that an actor holds


class Agent:
    """The agent of one node, as an actor."""

    def __init__(self):
        self.reserved = []

    def place(self):
        """The address of its node, and a port that the system gives to nobody else while this actor lives."""
        ip = ray.util.get_node_ip_address()
        holder = socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET)
        # Bound, without listening: a server that reuses addresses, as all do, can still listen there.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((ip, 0))
        self.reserved.append(holder)
        return ip, holder.getsockname()[1]

    def start(self, job, node, endpoint, token):
        environment = dict(os.environ)
        # Ray's own number is that of one process; the agent has several.
        environment.pop("OMP_NUM_THREADS", None)
        environment.pop("ACCEL_JOBS_ENV", None)  # Ray gives it to actors as well.
        environment.update({name: value.encode() for name, value in job["env"].items()})
        environment.update(PET_NODE_RANK=str(node), PET_RDZV_ENDPOINT=endpoint)
        # As bytes, whatever encoding this node's locale has.
        command = [word.encode() for word in job["command"]]
        for at in (0, command.index(b"--") + 1):
            # A file of the package, which is the folder that Ray starts actors in.
            if command[at].startswith(b"./"):
                command[at] = os.path.abspath(command[at])
        self.log_dir = None
        if node == 0:
            self.log_dir = tempfile.mkdtemp(prefix=".logs-", dir=".")
            command[1:1] = ["--log-dir", os.path.abspath(self.log_dir)]
        self.tensorboard = None
        address = None
        if node == 0 and job["logdir"]:
            ip, port = self.place()
            address = f"http://{bracketed(ip)}:{port}"
            words = ["tensorboard", "--host", ip, "--port", str(port), "--logdir", job["logdir"]]
            self.tensorboard = spawn(words, environment, job["working_dir"], ())
            threading.Thread(target=self.tensorboard.stdout.read, daemon=True).start()
        # The agent reads the token once, from a pipe: no file and no variable has it.
        token_end, write_end = os.pipe()
        os.write(write_end, token.encode())
        os.close(write_end)
        environment["ACCEL_TOKEN_FILE"] = f"/dev/fd/{token_end}"
        self.process = spawn(command, environment, job["working_dir"], (token_end,))
        os.close(token_end)
        self.output, self.ended, self.changed = bytearray(), False, threading.Condition()
        threading.Thread(target=self._pump, daemon=True).start()
        return address

    def _pump(self):
        while data := os.read(self.process.stdout.fileno(), 1 << 16):
            with self.changed:
                self.output += data
                self.changed.notify_all()
                # Ranks wait where the driver is slower than they are.
                self.changed.wait_for(lambda: len(self.output) < LIMIT)
        self.process.wait()
        with self.changed:
            self.ended = True
            self.changed.notify_all()

    def read(self):
        """What it has printed; once there is nothing more, its exit code and the launcher's report of a failure."""
        with self.changed:
            self.changed.wait_for(lambda: self.output or self.ended, timeout=10)
            output = bytes(self.output)
            self.output.clear()
            self.changed.notify_all()
            if output or not self.ended:
                return output, None, None
        code = self.process.returncode
        return b"", code if code >= 0 else 128 - code, self._report()

    def _report(self):
        try:
            with open(os.path.join(self.log_dir, "latest", "failure.json")) as file:
                return json.load(file).get("first")
        except (OSError, TypeError, ValueError):
            return None

    def stop(self):
        """Ends it, and what it started."""
        for process in filter(None, [getattr(self, "process", None), getattr(self, "tensorboard", None)]):
            process.terminate()
            try:
                process.wait(GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if getattr(self, "log_dir", None):
            shutil.rmtree(self.log_dir, ignore_errors=True)


def spawn(command, environment, folder, descriptors):
    """Starts a process that ends with the actor, however that ends."""
    prctl = ctypes.CDLL(None).prctl

    def prepare():
        prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
        # Ray blocks SIGINT.
        signal.pthread_sigmask(signal.SIG_SETMASK, [])

    return subprocess.Popen(
        command, env=environment, cwd=folder, pass_fds=descriptors, preexec_fn=prepare, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)


def bracketed(ip):
    return f"[{ip}]" if ":" in ip else ip


class Over(Exception):
    """The job is over, whatever its agents do: status, reason, exit code."""


class Gang:
    """A job: its agents, and what is known of them."""

    def __init__(self, job, job_id, state_file):
        self.job, self.state_file = job, state_file
        self.stopping, self.deadline = False, None
        self.loss = None  # why it was started again
        self.names = [job["name"] + ("-master-0" if node == 0 else f"-worker-{node - 1}") for node in range(job["nodes"])]
        self.tails = [collections.deque(maxlen=LAST_LINES) for _ in self.names]
        self.partial = [b"" for _ in self.names]
        node = {"node": None, "status": "PENDING", "started": None, "ended": None, "exit_code": None, "reason": None}
        self.nodes = [{"name": name, "restarts": 0, **node} for name in self.names]
        self.state = {"job_id": job_id, "status": "PENDING", "reason": None, "started": None, "restarts": 0,
                      "tensorboard": None, "instances": self.nodes, "failure": None}

    def run(self):
        """Runs the job to its end: its exit code."""
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "stopping", True))
        self.write()
        try:
            while True:
                code = self.attempt()
                if code != LOST or self.state["restarts"] >= self.job["max_restarts"]:
                    break
                self.state["restarts"] += 1
                self.loss = self.state["reason"]
                self.state.update(status="RESTARTING", failure=None)
                self.say(f"{self.state['reason']}; starting again ({self.state['restarts']} of {self.job['max_restarts']})")
            self.state["status"] = "FAILED" if code else "SUCCEEDED"
        except Over as over:
            self.state["status"], self.state["reason"], code = over.args
        except Exception as error:  # Ray's and this file's own: the job ends, and `get` says why.
            self.fail(0, 1, " ".join(str(error).split()))
            self.state["status"], code = "FAILED", 1
        self.write()
        return code

    def attempt(self):
        """Starts all agents, and waits until they have ended."""
        options = {"num_cpus": self.job["bundle"].get("CPU", 0), "num_gpus": self.job["bundle"].get("GPU", 0),
                   "memory": self.job["bundle"].get("memory"), "max_concurrency": 4, "max_restarts": 0}
        group = placement_group([self.job["bundle"]] * len(self.nodes), strategy=self.job["strategy"])
        for node in self.nodes:
            node["status"] = "PENDING"
        try:
            agents = [
                ray.remote(Agent).options(
                    name=f"accel-jobs/{name}/{self.state['restarts']}", **options,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=node),
                ).remote() for node, name in enumerate(self.names)]
            try:
                places = self.places(group, agents)
                if places is None or not self.start(agents, places):
                    return LOST
                return self.watch(agents)
            finally:
                self.end(agents)
        finally:
            remove_placement_group(group)

    def places(self, group, agents):
        """Waits until all agents have a place; none where one was lost meanwhile."""
        waiting, began = [agent.place.remote() for agent in agents], time.monotonic()
        places = list(waiting)
        while waiting:
            ready, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=0.5)
            self.check()
            for ref in ready:
                node = places.index(ref)
                try:
                    places[node] = ray.get(ref)
                except ray.exceptions.RayActorError as error:
                    return self.lost(node, error)
            if waiting and time.monotonic() - began > 2:
                self.state["reason"] = "; ".join(filter(None, [self.loss, self.why_waiting(group)]))
                self.write()
        return places

    def why_waiting(self, group):
        """Why there is no place for all agents, with what the cluster has."""
        table = placement_group_table(group)
        if table.get("state") == "CREATED":
            return "its nodes unpack the files of the job"
        word = (table.get("stats") or {}).get("scheduling_state") or table.get("state")
        bundle = self.job["bundle"]
        nodes = [f"{node['NodeManagerAddress']} has {amounts(bundle, node['Resources'])}"
                 for node in ray.nodes() if node["Alive"]]
        spread = ", each on a node of its own" if self.job["strategy"] == "STRICT_SPREAD" else ""
        return (f"Ray has no place for {len(self.nodes)} agents with {amounts(bundle, bundle)} each{spread} ({word}): "
                f"{'; '.join(nodes)}; free in all: {amounts(bundle, ray.available_resources())}")

    def start(self, agents, places):
        """Starts the agents; whether none was lost meanwhile."""
        ip, port = places[0]
        endpoint, token = f"{bracketed(ip)}:{port}", secrets.token_hex(32)
        started = [agent.start.remote(self.job, node, endpoint, token) for node, agent in enumerate(agents)]
        for node, ref in enumerate(started):
            try:
                address = ray.get(ref)
            except ray.exceptions.RayActorError as error:
                self.lost(node, error)
                return False
            except ray.exceptions.RayTaskError as error:
                self.fail(node, 1, f"its agent does not start: {error.cause}")
                raise Over("FAILED", self.state["reason"], 1) from error
            self.state["tensorboard"] = address or self.state["tensorboard"]
            again = self.nodes[node]["started"] is not None
            self.nodes[node].update(
                node=places[node][0], status="RUNNING", started=time.time(), ended=None, exit_code=None,
                reason=self.nodes[node]["reason"] if again else None,
                restarts=self.nodes[node]["restarts"] + again)
        self.state.update(status="RUNNING", reason=self.loss, started=self.state["started"] or time.time())
        if self.deadline is None and self.job["time_limit"]:
            self.deadline = time.monotonic() + self.job["time_limit"]
        self.write()
        return True

    def watch(self, agents):
        """Shows their output until they have ended: the exit code of the job."""
        reads = {agent.read.remote(): node for node, agent in enumerate(agents)}
        codes, reports, settled = {}, {}, None
        while reads and (settled is None or time.monotonic() < settled):
            ready, _ = ray.wait(list(reads), timeout=0.5)
            self.check()
            for ref in ready:
                node = reads.pop(ref)
                try:
                    output, code, report = ray.get(ref)
                except ray.exceptions.RayActorError as error:
                    self.lost(node, error)
                    return LOST
                self.show(node, output)
                if code is None:
                    reads[agents[node].read.remote()] = node
                    continue
                settled = settled or time.monotonic() + SETTLE
                codes[node], reports[node] = code, report
                self.nodes[node].update(status="FAILED" if code else "SUCCEEDED", exit_code=code, ended=time.time())
                self.show(node, b"\n" if self.partial[node] else b"")
                self.write()
        node = 0 if 0 in codes else next(iter(codes))
        code = codes[node]
        if code:
            report = reports[node]
            self.fail(node, code, "its agent ended with exit code " + str(code), report)
        return code

    def check(self):
        if self.stopping:
            raise Over("STOPPED", "stopped by its user", 128 + signal.SIGTERM)
        if self.deadline and time.monotonic() > self.deadline:
            raise Over("FAILED", "its time limit is over", 1)

    def lost(self, node, error):
        """An agent whose actor is gone, in Ray's words."""
        lines = [line.strip() for line in str(error).splitlines()]
        place = next((line[4:] for line in lines if line.startswith("ip: ")), self.nodes[node]["node"])
        of_actor = r"$|(class_name|actor_id|name|namespace|pid|ip): |The actor (died unexpectedly|never ran)"
        words = " ".join(line for line in lines if not re.match(of_actor, line))
        self.nodes[node].update(status="FAILED", ended=time.time(), exit_code=None, reason=f"lost on node {place}: {words}")
        self.fail(node, LOST, self.nodes[node]["reason"])

    def fail(self, node, code, reason, report=None):
        """Keeps why the job ends, or is started again."""
        lines = [line.decode(errors="replace") for line in self.tails[node]]
        failure = {"instance": self.names[node], "exit_code": code, "reason": reason, "last_lines": lines}
        if report:
            failure.update(instance=self.names[report["node"]], exit_code=report["exit_code"],
                           reason=f"rank {report['rank']}: {report['cause']}", last_lines=report["last_words"])
        self.state.update(reason=f"{failure['instance']}: {failure['reason']}", failure=failure)
        self.write()

    def end(self, agents):
        """Ends what is left of all agents."""
        # Who has no place yet does not answer.
        refs = [agent.stop.remote() for node, agent in enumerate(agents) if self.nodes[node]["status"] != "PENDING"]
        if refs:
            ray.wait(refs, num_returns=len(refs), timeout=GRACE + 5)
        for node, agent in enumerate(agents):
            ray.kill(agent)
            if self.nodes[node]["status"] == "RUNNING":
                self.nodes[node].update(status="STOPPED", ended=time.time())
        self.write()

    def show(self, node, output):
        """Prints whole lines, those of other nodes than node 0 with the name of the instance."""
        *lines, self.partial[node] = (self.partial[node] + output).split(b"\n")
        mark = b"" if node == 0 else RS + f"[{self.names[node]}] ".encode()
        sys.stdout.buffer.write(b"".join(mark + line + b"\n" for line in lines))
        sys.stdout.buffer.flush()
        self.tails[node].extend(lines)

    def say(self, text):
        print(f"accel-jobs: {text}", flush=True)

    def write(self):
        with open(self.state_file + ".new", "w") as file:
            json.dump(self.state, file)
        os.replace(self.state_file + ".new", self.state_file)


def amounts(names, resources):
    """How much there is of the resources of these names."""
    def amount(name):
        has = resources.get(name, 0)
        return f"memory {has / (1 << 30):.4g} GiB" if name == "memory" else f"{name} {has:g}"
    return ", ".join(amount(name) for name in names)


def main():
    job = json.loads(os.fsencode(sys.argv[1]))
    job["env"] = json.loads(os.environ.pop("ACCEL_JOBS_ENV"))
    ray.init(log_to_driver=False, logging_level="ERROR")
    # A job of the same name may have been before: Ray continues with its log.
    job_id = ray.get_runtime_context().get_job_id()
    sys.stdout.buffer.write(RS + json.dumps({"job_id": job_id}).encode() + b"\n")
    sys.stdout.buffer.flush()
    log = os.readlink("/proc/self/fd/1")
    sys.exit(Gang(job, job_id, os.path.join(os.path.dirname(log), f"accel-jobs-{job['name']}.json")).run())


if __name__ == "__main__":
    main()
