#!/usr/bin/env bash
# A real Slurm with four nodes of two processors each.

# shellcheck source=tests/hosts/lib.sh
. tests/hosts/lib.sh
SLURM_DIR=$DIR/s

engine_missing() {
    net_possible || return 0
    [ -x /usr/sbin/slurmctld ] || echo 'it is not installed (tests/engines/install slurm)'
}

engine_up() {
    mkdir -p "$DIR/bin" "$ENGINE_DIR/out"
    cp "$LAUNCHER" "$JOBS" "$DIR/bin/"
    JOBS=$DIR/bin/accel-jobs
    SUBMIT=(--working-dir "$ENGINE_DIR/out")
    tests/engines/slurm up "$SLURM_DIR" 4
    SLURM_NET=$(cat "$SLURM_DIR/net")
}

engine_down() { [ ! -e "$SLURM_DIR" ] || tests/engines/slurm down "$SLURM_DIR"; }

here() { tests/engines/slurm in "$SLURM_DIR" env PATH="$DIR/bin:$PATH" "$@"; }

# job_node JOB INSTANCE: prints the number of the node that runs the instance.
job_node() { jobs get "$1" | sed -n "s/.* $1-$2 *n//p"; }

job_id() { here squeue -h -t all -n "$1" -o %i | tail -n 1; }

# The node comes back once Slurm has noticed its loss.
lose_instance() {
    local node
    node=$(job_node "$1" "$2")
    tests/engines/slurm lose "$SLURM_DIR" "$node"
    until_shown "${3:-"node n$node is down"}" jobs get "$1" || return 1
    tests/engines/slurm return "$SLURM_DIR" "$node"
}

lose_node() { lose_instance "$1" worker-0; }

# Lists the job's entries in Slurm, its processes on the nodes, and its files there.
engine_left() {
    local host pid
    here squeue -h -n "$1" -o '%i %T'
    for host in 1 2 3 4; do
        for pid in $(ip netns pids "$SLURM_NET-h$host"); do
            ! grep -sqzx "SLURM_JOB_NAME=$1" "/proc/$pid/environ" || echo "n$host: $(tr '\0' ' ' <"/proc/$pid/cmdline")"
        done
    done
    compgen -G "/tmp/$1-*" || true
}

engine_tests() {
    local test
    # This job takes a minute or two, so the others run meanwhile.
    expect submitted jobs submit --engine slurm --name slurm-limit --time 30s -- sleep 600 || return 0
    for test in ${SLURM_TESTS:-refused options pending said_by_hand environment broadcast board first_node no_restart preempted \
        cancelled forgotten documented silent}; do
        "slurm_$test" || fail "$test"
    done
}

# plain NAME OPTION... -- PROGRAM ARGUMENT...: submits a job without default options.
plain() {
    local name=$1
    shift
    jobs submit --engine slurm --name "$name" "$@"
}

# gone NAME...: frees the names of jobs that have been checked.
gone() { jobs stop "$@" --forget >/dev/null || fail "stop $*"; }

slurm_refused() {
    refuse 'no node has so much' plain slurm-refused --memory 2Gi -- sleep 1
    refuse 'no node has such GPUs' plain slurm-refused --gpus 1 -- sleep 1
    refuse 'give one by --partition' plain slurm-refused --partition nowhere -- sleep 1
    refuse 'names them' plain slurm-refused --constraint nothing -- sleep 1
    refuse 'cannot stand' plain slurm-refused --account $'a\n#SBATCH --uid=0' -- sleep 1
    refuse 'not a program' plain slurm-refused -- ./nothing
    # Slurm itself would fall back to /tmp.
    expect submitted plain slurm-nowhere --working-dir /no/such -- true
    refuse 'ended as FAILED' jobs wait slurm-nowhere
    expect '/no/such: No such file' jobs get slurm-nowhere
    gone slurm-nowhere
    # A refused submission leaves nothing behind.
    refuse 'no job' jobs get slurm-refused
    [ -z "$(here squeue -h -n slurm-refused)" ] || fail 'a submission that is refused leaves a job'
}

# The command line overrides the environment, and no variable hides a job.
slurm_options() {
    here env SBATCH_PARTITION=nowhere SBATCH_TIMELIMIT=1 SBATCH_JOB_NAME=other SBATCH_NO_REQUEUE=1 SBATCH_MEM_PER_CPU=9999999 \
        "$JOBS" submit --engine slurm --name slurm-options --partition all --time 3h --memory 64Mi --max-restarts 1 -- sleep 600 >/dev/null ||
        fail 'the environment counts more than options'
    until_shown '^STATUS: RUNNING' jobs get slurm-options
    local shown word
    shown=$(here scontrol show job "$(job_id slurm-options)")
    for word in JobName=slurm-options Partition=all TimeLimit=03:00:00 Requeue=1 MinMemoryNode=64M; do
        grep -q "$word" <<<"$shown" || fail "no $word in: $shown"
    done
    refuse 'known by the file of its output' plain slurm-hidden --sbatch-arg=--output=/tmp/x -- sleep 1
    refuse 'SLURM_CLUSTERS is set' here env SLURM_CLUSTERS=other "$JOBS" submit --engine slurm --name slurm-hidden -- sleep 1
    # The job is on the cluster that it was submitted to, whatever the environment says now.
    expect stopped here env SLURM_CLUSTERS=other "$JOBS" stop slurm-options
    gone slurm-options
}

slurm_pending() {
    plain slurm-many --nodes 9 -- sleep 1 >/dev/null
    plain slurm-later --sbatch-arg=--begin=now+1hour -- sleep 1 >/dev/null
    plain slurm-busy --nodes 4 --sbatch-arg=--exclusive -- sleep 1 >/dev/null
    until_shown '^REASON: PartitionConfig' jobs get slurm-many
    until_shown '^REASON: BeginTime' jobs get slurm-later
    until_shown '^REASON: (Resources|Priority)' jobs get slurm-busy
    expect '^STATUS: PENDING' jobs get slurm-busy
    expect stopped jobs stop slurm-many slurm-later slurm-busy
    expect '^slurm-many +STOPPED' jobs list
    gone slurm-many slurm-later slurm-busy
}

# The script that --dry-run prints after the options is the one that Slurm runs.
slurm_said_by_hand() {
    plain slurm-script --env 'A=it'"'"'s' -- sleep 100 >/dev/null
    local dry
    dry=$(plain slurm-other --env 'A=it'"'"'s' --dry-run -- sleep 100 |
        sed "1d; \$d; s,JOB_DIR,$XDG_STATE_HOME/accel-jobs/slurm-script,; s,slurm-other,slurm-script,")
    [ "$(here scontrol write batch_script "$(job_id slurm-script)" -)" = "$dry" ] || fail 'another script than --dry-run shows'
    gone slurm-script
}

slurm_environment() {
    local odd=$'it\'s "$HOME"\r\n`id` \\ \t*'
    # shellcheck disable=SC2016 # a program's own words
    plain slurm-env --env "ODD=$odd" --env code=5 --env folder=/nowhere -- bash -c 'printf %s "$ODD" >"$1"' sh "$ENGINE_DIR/odd" >/dev/null
    jobs wait slurm-env --timeout "${LIMIT}s" || fail 'a job with odd variables'
    [ "$(cat "$ENGINE_DIR/odd")" = "$odd" ] || fail 'a variable is not what was given'
    gone slurm-env
    # shellcheck disable=SC2016 # a program's own words
    plain slurm-env --env folder=mine --env code=5 -- bash -c 'echo "$folder $code" >"$1"' sh "$ENGINE_DIR/own" >/dev/null
    jobs wait slurm-env --timeout "${LIMIT}s" || fail 'a job with variables of the names of ours'
    [ "$(cat "$ENGINE_DIR/own")" = 'mine 5' ] || fail 'the script overwrites a variable'
    gone slurm-env
    expect submitted jobs --jobs-dir "$ENGINE_DIR/100% 'odd' %j" submit --engine slurm --name slurm-odd -- echo here
    jobs --jobs-dir "$ENGINE_DIR/100% 'odd' %j" wait slurm-odd --timeout "${LIMIT}s" || fail 'a job with an odd folder'
    expect 'here' jobs --jobs-dir "$ENGINE_DIR/100% 'odd' %j" logs slurm-odd
}

# The program may change or be deleted while its job waits.
slurm_broadcast() {
    cp "$(program regression)" "$ENGINE_DIR/program"
    submit slurm-copy --broadcast --sbatch-arg=--begin=now+2 -- "$ENGINE_DIR/program" >/dev/null
    rm "$ENGINE_DIR/program"
    jobs wait slurm-copy --timeout "${LIMIT}s" || { fail 'a broadcast'; jobs get slurm-copy >&2; }
    expect '4 ranks' jobs logs slurm-copy
    [ -z "$(engine_left slurm-copy)" ] || fail "a broadcast leaves $(engine_left slurm-copy)"
    gone slurm-copy
}

# A program that prints the same as TensorBoard.
slurm_board() {
    cat >"$DIR/bin/tensorboard" <<'PROGRAM'
#!/usr/bin/env python3
import http.server, sys
host = sys.argv[sys.argv.index("--host") + 1]
server = http.server.HTTPServer((host, 0), http.server.SimpleHTTPRequestHandler)
print(f"TensorBoard 2.21.0 at http://{host}:{server.server_port}/ (Press CTRL+C to quit)", flush=True)
server.serve_forever()
PROGRAM
    chmod 755 "$DIR/bin/tensorboard"
    plain slurm-board --tensorboard --logdir "$ENGINE_DIR/out" -- sleep 600 >/dev/null
    until_shown '^http://n[1-4]:[0-9]+/$' jobs get slurm-board
    expect 'Directory listing' here curl -s "$(jobs get slurm-board | tail -n 1)"
    expect stopped jobs stop slurm-board
    [ -z "$(engine_left slurm-board)" ] || fail "a TensorBoard leaves $(engine_left slurm-board)"
    gone slurm-board
}

# Loses the node of the batch script and of the head.
slurm_first_node() {
    local out=$ENGINE_DIR/first
    mkdir "$out"
    # shellcheck disable=SC2046 # words
    submit slurm-first --max-restarts 1 -- "$(program resumable)" $(arguments resumable "$out") >/dev/null
    until_shown checkpoint- ls "$out/checkpoints"
    lose_instance slurm-first master-0
    jobs wait slurm-first --timeout "${LIMIT}s" || { jobs get slurm-first >&2; return 1; }
    expect 'RESTARTS: 1' jobs get slurm-first
    [ "$(result "$out" resumable)" = "$(result "$DIR/reference" resumable)" ] || fail 'the loss of node 0 changes the weights'
    gone slurm-first
}

slurm_no_restart() {
    submit slurm-none -- "$(program resumable)" --checkpoints "$ENGINE_DIR/none" --epochs 1000 >/dev/null
    until_shown '4 ranks' jobs logs slurm-none
    lose_instance slurm-none worker-0 'REASON: NODE_FAIL'
    expect 'FAILURE: slurm-none-worker-0: .*n[1-4].* was lost' jobs get slurm-none
    refuse FAILED jobs wait slurm-none
    gone slurm-none
}

# Sends the signal of a preemption and of the end of a time limit.
slurm_preempted() {
    local out=$ENGINE_DIR/preempted
    mkdir "$out"
    # shellcheck disable=SC2046 # words
    submit slurm-saved --max-restarts 1 -- "$(program resumable)" $(arguments resumable "$out") >/dev/null
    until_shown checkpoint- ls "$out/checkpoints"
    here scancel --signal=TERM "$(job_id slurm-saved)"
    until_shown 'STATUS: RESTARTING' jobs get slurm-saved
    jobs wait slurm-saved --timeout "${LIMIT}s" || { jobs get slurm-saved >&2; return 1; }
    expect 'all ranks have saved' jobs logs slurm-saved
    [ "$(result "$out" resumable)" = "$(result "$DIR/reference" resumable)" ] || fail 'a preemption changes the weights'
    gone slurm-saved
}

slurm_cancelled() {
    submit slurm-cancelled --max-restarts 3 -- "$(program resumable)" --checkpoints "$ENGINE_DIR/cancelled" --epochs 1000 >/dev/null
    until_shown '4 ranks' jobs logs slurm-cancelled
    here scancel "$(job_id slurm-cancelled)"
    until_shown '^STATUS: STOPPED' jobs get slurm-cancelled
    [ -z "$(engine_left slurm-cancelled)" ] || fail "scancel leaves $(engine_left slurm-cancelled)"
    gone slurm-cancelled
}

# The job's folder still knows a job that Slurm has forgotten.
slurm_forgotten() {
    local record=$XDG_STATE_HOME/accel-jobs/slurm-forgotten/job.json
    plain slurm-forgotten -- sh -c 'exit 3' >/dev/null
    until_shown FAILED here squeue -h -t all -n slurm-forgotten -o %T
    sed -i 's/"id": ".*"/"id": "999999"/' "$record"
    expect 'FAILURE: .*exit code 3' jobs get slurm-forgotten
    expect 'had ended as FAILED' jobs stop slurm-forgotten
    gone slurm-forgotten
}

# Runs every command of docs/slurm.md.
slurm_documented() {
    mkdir -p "$ENGINE_DIR/docs/target/release"
    ln -sfn "$EXAMPLES" "$ENGINE_DIR/docs/target/release/examples"
    sed -n '/^```sh/,/^```/{/^```/d;p}' docs/slurm.md >"$ENGINE_DIR/docs/commands"
    here timeout "$LIMIT" bash -ec "cd '$ENGINE_DIR/docs' && . ./commands" >"$ENGINE_DIR/docs/said" 2>&1 ||
        { fail docs/slurm.md; tail -n 20 "$ENGINE_DIR/docs/said" >&2; }
}

# The controller of Slurm does not answer; the job with a time limit has ended meanwhile.
slurm_silent() {
    until_shown '^REASON: TIMEOUT' jobs get slurm-limit
    refuse FAILED jobs wait slurm-limit
    plain slurm-silent -- sleep 600 >/dev/null
    until_shown 'STATUS: RUNNING' jobs get slurm-silent
    sed 's/^SlurmctldPort=.*/SlurmctldPort=9/' "$SLURM_DIR/slurm.conf" >"$ENGINE_DIR/silent.conf"
    refuse 'its controller is up' here env SLURM_CONF="$ENGINE_DIR/silent.conf" "$JOBS" get slurm-silent
    refuse 'its controller is up' here env SLURM_CONF="$ENGINE_DIR/silent.conf" "$JOBS" submit --engine slurm --name slurm-lost -- sleep 1
    expect 'slurm-silent +RUNNING' here env SLURM_CONF="$ENGINE_DIR/silent.conf" "$JOBS" list
    gone slurm-silent slurm-limit
}
