# Prints what TensorBoard's HParams table has of a folder of logs, once it has so many rows that have ended.
import json
import sys
import time
import urllib.request

from tensorboard import program

logs, expected = sys.argv[1], int(sys.argv[2])
board = program.TensorBoard()
board.configure(argv=[None, "--logdir", logs, "--port", "0", "--reload_interval", "1", "--load_fast", "false"])
address = board.launch() + "data/plugin/"
STATUSES = ["STATUS_UNKNOWN", "STATUS_SUCCESS", "STATUS_FAILURE", "STATUS_RUNNING"]
question = {"experimentName": "", "allowedStatuses": STATUSES, "colParams": [], "startIndex": 0, "sliceSize": 100}


def ask(path, data=None):
    body = data and json.dumps(data).encode()
    request = urllib.request.Request(address + path, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=20) as answer:
        return json.load(answer)


for _ in range(120):
    try:
        groups = ask("hparams/session_groups", question).get("sessionGroups", [])
    except OSError:
        groups = []
    if sum(session["status"] == "STATUS_SUCCESS" for group in groups for session in group["sessions"]) >= expected:
        break
    time.sleep(0.5)
points = {group["name"]: ask(f"scalars/scalars?run={group['name']}&tag=loss") for group in groups}
print(json.dumps([{"group": group, "points": points[group["name"]]} for group in groups]))
