#!/usr/bin/env bash
# The local engine: agents on this machine.

engine_missing() { :; }
engine_up() { :; }
engine_down() { :; }

# Kills the launcher of the second agent; its supervisor restarts it.
lose_node() {
    local state=$XDG_STATE_HOME/accel-jobs/$1/state.json
    kill -9 "$(python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["nodes"][1]["agent"]["pid"])' "$state")"
}

# Lists the processes that the supervisor has started, and those with the job's folder in their command line.
engine_left() {
    local state=$XDG_STATE_HOME/accel-jobs/$1/state.json pid
    for pid in $(python3 -c 'import json, sys; print(*(x["agent"]["pid"] for x in json.load(open(sys.argv[1]))["nodes"]))' "$state"); do
        ! kill -0 "$pid" 2>/dev/null || echo "agent $pid"
    done
    pgrep -af "accel-jobs/$1" || true
}

engine_tests() {
    local name=local-time
    expect submitted jobs submit --name "$name" --time 1s -- sleep 100
    refuse FAILED jobs wait "$name" --timeout 30s
    expect 'time limit' jobs get "$name"
    expect stopped jobs stop "$name" --forget
    refuse 'not a program' jobs submit --name "$name" -- ./no-such-program
    refuse 'no job' jobs get "$name"
    # A job whose supervisor is killed.
    expect submitted jobs submit --name "$name" --nodes 2 -- sleep 100
    kill -9 "$(python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["pid"])' "$XDG_STATE_HOME/accel-jobs/$name/supervisor.lock")"
    until_shown 'supervisor was killed' jobs get "$name"
    expect 'nothing of it is left' jobs stop "$name"
    [ -z "$(engine_left "$name")" ] || fail "stop leaves agents whose supervisor was killed"
    expect stopped jobs stop "$name" --forget
}
