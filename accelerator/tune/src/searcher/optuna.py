# Answers a search's calls by Optuna: a JSON object a line in, one out. It ends where its standard input does.
import sys

# Not what lies in the present folder, such as another optuna.py.
sys.path = [path for path in sys.path if path]

import inspect
import json
import os
import queue
import threading
import traceback

# What a library prints is no reply.
replies = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)


def reply(**fields):
    replies.write(json.dumps(fields, allow_nan=False) + "\n")
    replies.flush()


calls = queue.SimpleQueue()


def read():
    for line in sys.stdin:
        calls.put(json.loads(line))
    # The search has ended, however long a call still takes.
    os._exit(0)


threading.Thread(target=read, daemon=True).start()


def open_study(call):
    global optuna, study, space
    try:
        import optuna
        from optuna.distributions import json_to_distribution
    except ImportError as error:
        return reply(error="import", message=str(error))
    version = optuna.__version__
    if version.split(".")[0] != "5":
        return reply(error="version", message=version)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = getattr(optuna.samplers, call["sampler"], None)
    if not inspect.isclass(sampler):
        known = [name for name in dir(optuna.samplers) if name.endswith("Sampler") and name != "BaseSampler"]
        return reply(error="sampler", message=", ".join(known))
    arguments = call["args"]
    if "seed" in inspect.signature(sampler).parameters:
        arguments = {"seed": call["seed"], **arguments}
    study = optuna.create_study(directions=call["directions"], sampler=sampler(**arguments))
    space = {name: json_to_distribution(json.dumps(value)) for name, value in call["space"].items()}
    reply(ok="open", optuna=version)


trials = {}


def answer(call):
    op = call["op"]
    if op == "open":
        return open_study(call)
    if op == "ask":
        trial = trials[call["id"]] = study.ask(space)
        return reply(ok="ask", params=trial.params)
    trial = trials[call["id"]]
    if op == "report":
        trial.report(float(call["value"]), call["step"])
        return reply(ok="report")
    state = optuna.trial.TrialState[call["state"]]
    value = call.get("value")
    study.tell(trial, None if value is None else float(value), state)
    del trials[call["id"]]
    reply(ok="tell")


while True:
    call = calls.get()
    try:
        answer(call)
    except Exception as error:
        traceback.print_exc()
        reply(error="exception", message=f"{type(error).__name__}: {error}")
