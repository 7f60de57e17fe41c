#!/usr/bin/env bash
# Ray on two hosts. To be sourced by common.sh.

. tests/hosts/lib.sh

RAY_DIR=$ENGINE_DIR/ray

engine_missing() {
    net_possible || return 0
    [ -x "${ENGINE_TESTS_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/accelerate-tests}/ray/bin/ray" ] ||
        echo 'there is no Ray: run tests/engines/install ray'
}
engine_up() { tests/engines/ray up "$RAY_DIR"; }
engine_down() { tests/engines/ray down "$RAY_DIR"; }
here() { tests/engines/ray in "$RAY_DIR" "$@"; }

# Host 1 has the head of Ray, and losing it would lose Ray itself.
lose_node() {
    tests/engines/ray lose "$RAY_DIR" 2 && tests/engines/ray return "$RAY_DIR" 2 || return
    until_shown "REASON: $1-(master|worker)-0: lost on node 10.77.0.2" jobs get "$1"
}

# Lists what Ray has of the job, and processes of jobs. Ray removes actors after the end of their driver, so wait for
# that.
engine_left() {
    local left='' end=$((SECONDS + 20))
    while [ $SECONDS -lt $end ]; do
        left=$(listed "$1"; processes)
        [ -n "$left" ] || return 0
        sleep 0.5
    done
    echo "$left"
}

listed() {
    here python - "$1" <<'PYTHON'
import json, os, sys, urllib.request


def get(path):
    with urllib.request.urlopen(os.environ["RAY_ADDRESS"] + path) as answer:
        return json.load(answer)


def rows(kind):
    return get(f"/api/v0/{kind}?limit=1000")["data"]["result"]["result"]


left = [job["submission_id"] for job in get("/api/jobs/") if job["submission_id"] == sys.argv[1]]
left += [actor["class_name"] for actor in rows("actors") if actor["state"] != "DEAD"]
left += ["a placement group" for group in rows("placement_groups") if group["state"] != "REMOVED"]
print(" ".join(left), end="")
PYTHON
}

processes() {
    local host pid
    for host in 1 2; do
        for pid in $(ip netns pids "$(cat "$RAY_DIR/net")-h$host"); do
            tr '\0' ' ' <"/proc/$pid/cmdline" 2>/dev/null | grep -E '^ray::Agent|gang\.py|^[^ ]*(accel-launch|resumable|regression|mnist) ' || true
        done
    done
}

engine_tests() {
    local name=ray-own
    expect '^10.77.0.2 .*ready' jobs top nodes --engine ray
    # A job that does not fit.
    expect submitted submit "$name" --cpus 64 -- sleep 100
    until_shown 'REASON: Ray has no place for 2 agents with CPU 64 each.*10.77.0.2 has CPU 2' jobs get "$name"
    expect '^STATUS: PENDING' jobs get "$name"
    # A name that Ray already has; another user has no record of that job.
    refuse 'has a job ray-own already' jobs --jobs-dir "$DIR/other" submit --engine ray --name "$name" -- sleep 1
    expect stopped jobs stop "$name" --forget
    # Files beside the program, a shell command, and a hidden token.
    echo 'it is included' >"$ENGINE_DIR/note"
    expect submitted submit "$name" --ray-include "$ENGINE_DIR/note" -- 'cat note; sleep 8'
    until_shown '^STATUS: RUNNING' jobs get "$name"
    until_shown '\[3\] it is included' jobs logs "$name"
    expect "joined host 0" jobs logs "$name" -i "$name-worker-0"
    if here curl -s "http://10.77.0.1:8265/api/jobs/$name" | grep -i token; then fail 'the token is shown'; fi
    expect '' jobs wait "$name" --timeout "${LIMIT}s"
    expect stopped jobs stop "$name" --forget
    # A program in a folder that the nodes share, with a time limit.
    expect submitted submit "$name" --no-upload --working-dir "$ENGINE_DIR" --time 2s -- sh -c 'pwd; sleep 100'
    refuse FAILED jobs wait "$name" --timeout "${LIMIT}s"
    expect 'REASON: its time limit is over' jobs get "$name"
    expect "$ENGINE_DIR" jobs logs "$name"
    expect stopped jobs stop "$name" --forget
    expect submitted submit "$name" -- no-such-program
    refuse FAILED jobs wait "$name" --timeout "${LIMIT}s"
    expect 'FAILURE: .*no-such-program|  .*no-such-program' jobs get "$name"
    expect stopped jobs stop "$name" --forget
    # A driver that is killed ends its agents.
    expect submitted submit "$name" -- sleep 1000
    until_shown '^STATUS: RUNNING' jobs get "$name"
    kill -9 "$(pgrep -f "^python gang.py .*$name")"
    refuse FAILED jobs wait "$name" --timeout "${LIMIT}s"
    expect 'FAILURE: ' jobs get "$name"
    expect stopped jobs stop "$name" --forget
    local left
    left=$(engine_left "$name")
    [ -z "$left" ] || fail "a driver that was killed leaves $left"
    refuse 'nothing answers' jobs top nodes --engine ray --ray-address http://10.77.0.1:1
    refuse 'no priorities' submit "$name" --priority high -- sleep 1
    refuse 'no job' jobs get "$name"
}
