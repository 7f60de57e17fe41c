#!/usr/bin/env bash
# The tests of every engine. To be sourced by `tests/engines/run`, from the project's folder.
#
# The file of an engine defines
#   engine_missing       prints why the engine cannot run here, or nothing
#   engine_up            starts it, with its files in $ENGINE_DIR
#   engine_down          stops all that engine_up has started; may be called twice
#   here COMMAND...      runs a command in a place that reaches the engine
#   SUBMIT=(...)         options of every `submit`
#   program NAME         the program's name on the nodes (an example's)
#   lose_node JOB        kills a node that runs a worker of the job, and brings it back
#   engine_left JOB      prints what a stopped job has left in the engine, or nothing
#   engine_tests         runs the tests of this engine alone

LIMIT=${LIMIT:-180}                 # seconds for one job
CI=${CI:-}
DIR=$(mktemp -d "${TMPDIR:-/tmp}/accel-engines.XXXXXX")
chmod 755 "$DIR"                    # Slurm's munge and others than root look into it
export XDG_STATE_HOME=$DIR/state
FAILED=0
ENGINE=
declare -a RESULTS=()

say() { printf '%s\n' "$*" >&2; }
fail() { FAILED=1; say "FAILED: $ENGINE: $*"; }

# expect PATTERN COMMAND...: the command must succeed, and its output must match the pattern.
expect() {
    local pattern=$1 output code=0
    shift
    output=$("$@" 2>&1) || code=$?
    if [ $code != 0 ] || ! grep -Eq -- "$pattern" <<<"$output"; then
        fail "$* (exit code $code) does not show /$pattern/:"
        sed 's/^/    /' <<<"$output" >&2
        return 1
    fi
}

# refuse PATTERN COMMAND...: the command must fail, and its message must match the pattern.
refuse() {
    local pattern=$1 output code=0
    shift
    output=$("$@" 2>&1) || code=$?
    if [ $code = 0 ] || ! grep -Eq -- "$pattern" <<<"$output"; then
        fail "$* (exit code $code) is not refused with /$pattern/:"
        sed 's/^/    /' <<<"$output" >&2
        return 1
    fi
}

# until_shown PATTERN COMMAND...: waits until the output matches the pattern, for at most LIMIT.
until_shown() {
    local pattern=$1 output='' end=$((SECONDS + LIMIT))
    shift
    while [ $SECONDS -lt $end ]; do
        output=$("$@" 2>&1) || true
        grep -Eq -- "$pattern" <<<"$output" && return
        sleep 0.2
    done
    fail "$* does not show /$pattern/ in $LIMIT s:"
    sed 's/^/    /' <<<"$output" >&2
    return 1
}

jobs() { here timeout "$LIMIT" "$JOBS" "$@"; }

# submit NAME OPTION... -- PROGRAM ARGUMENT...: submits four ranks on two nodes.
submit() {
    local name=$1
    shift
    jobs submit --engine "$ENGINE" --name "$name" --nodes 2 --nproc-per-node 2 "${SUBMIT[@]}" \
        --env ACCEL_TRANSPORT=tcp --env RAYON_NUM_THREADS=1 "$@"
}

arguments() {
    case $1 in
    regression) ;;
    mnist) echo --optimizer sgd --dropout 0 --epochs 2 --limit 512 --save "$2/mnist.safetensors" ;;
    # Long enough to lose a node during the training.
    resumable)
        echo --optimizer sgd --dropout 0 --limit 1024 --save-every 2 --checkpoints "$2/checkpoints" \
            --save "$2/resumable.safetensors" --epochs "${EPOCHS:-8}"
        ;;
    esac
}

# Prints a hash of the weights that a program has saved, or of the output of rank 0 if it saves none. Warnings of the
# launcher and of the library, which depend on the machine's load, are not counted.
result() {
    local folder=$1 program=$2
    if [ -e "$folder/$program.safetensors" ]; then
        sha256sum <"$folder/$program.safetensors" | cut -c1-16
    else
        sed -E 's/^\[[0-9]+\] //' "$folder/$program.out" | grep -Ev '^(accel-launch|accelerator):' | sha256sum | cut -c1-16
    fi
}

engines_begin() {
    trap 'engine_down >/dev/null 2>&1 || true; rm -rf "$DIR"' EXIT
    trap 'exit 130' INT TERM HUP
    engine_down() { :; }
    if [ -z "${LAUNCHER:-}" ] || [ -z "${EXAMPLES:-}" ]; then
        timeout 3600 cargo build --release --locked -p accel-launch -p accel-jobs -p accelerator-examples --bins --examples
    fi
    local target=${CARGO_TARGET_DIR:-target}
    LAUNCHER=$(realpath "${LAUNCHER:-$target/release/accel-launch}")
    EXAMPLES=$(realpath "${EXAMPLES:-$target/release/examples}")
    JOBS=$(realpath "${JOBS:-$(dirname "$LAUNCHER")/accel-jobs}")
    local program
    mkdir -p "$DIR/reference"
    for program in regression mnist resumable; do
        # shellcheck disable=SC2046 # words
        ACCEL_TRANSPORT=tcp RAYON_NUM_THREADS=1 timeout "$LIMIT" "$LAUNCHER" --quiet -n 4 "$EXAMPLES/$program" \
            $(arguments "$program" "$DIR/reference") >"$DIR/reference/$program.out" 2>"$DIR/reference/$program.err" </dev/null ||
            { say "FAILED: $program does not run locally:"; tail -n 5 "$DIR/reference/$program.err" >&2; exit 1; }
        RESULTS+=("four local ranks: $program $(result "$DIR/reference" "$program")")
    done
}

run_engine() {
    ENGINE=$1
    ENGINE_DIR=$DIR/$1
    SUBMIT=()
    mkdir -p "$ENGINE_DIR"
    here() { "$@"; }
    program() { echo "$EXAMPLES/$1"; }
    engine_tests() { :; }
    # shellcheck disable=SC1090 # one file an engine
    . "tests/engines/cases/$ENGINE.sh"
    local why
    why=$(engine_missing)
    if [ -n "$why" ]; then
        say "SKIPPED: $ENGINE: $why"
        RESULTS+=("$ENGINE: SKIPPED: $why")
        [ -z "${ENGINE_TESTS_REQUIRE:-}" ] || FAILED=1
        return 0
    fi
    local began=$SECONDS
    engine_up || { fail "it does not start"; engine_down || true; return 0; }
    RESULTS+=("$ENGINE: started in $((SECONDS - began)) s")
    same_bits regression
    same_bits mnist
    command_set
    node_loss
    search
    engine_tests || fail "its own tests"
    engine_down || fail "it does not end"
}

# A program must end with the weights of four local ranks.
same_bits() {
    local program=$1 began=$SECONDS
    local name=$ENGINE-$program
    mkdir -p "$ENGINE_DIR/out"
    # shellcheck disable=SC2046 # words
    expect "submitted" submit "$name" -- "$(program "$program")" $(arguments "$program" "$ENGINE_DIR/out") || return 0
    jobs wait "$name" --timeout "${LIMIT}s" || { fail "$name"; jobs get "$name" >&2; jobs logs "$name" -t 20 >&2; return 0; }
    jobs logs "$name" >"$ENGINE_DIR/out/$program.out"
    grep -q '4 ranks' "$ENGINE_DIR/out/$program.out" || fail "$name: it did not run as 4 ranks"
    compare "$program" "$name" $((SECONDS - began))
    expect stopped jobs stop "$name" --forget || true
}

compare() {
    local program=$1 name=$2 seconds=$3 expected found
    expected=$(result "$DIR/reference" "$program")
    found=$(result "$ENGINE_DIR/out" "$program")
    RESULTS+=("$ENGINE: $program $found after $seconds s")
    [ "$expected" = "$found" ] || fail "$name: its weights are $found, those of four local ranks $expected"
}

# Runs every command on a running job and on a stopped one.
command_set() {
    local name=$ENGINE-commands
    mkdir -p "$ENGINE_DIR/commands"
    expect "resumable" submit "$name-dry" --dry-run -- "$(program resumable)" --checkpoints "$ENGINE_DIR/c" || true
    refuse "no job" jobs get "$name-dry" || true
    # shellcheck disable=SC2046 # words
    expect "submitted" submit "$name" -- "$(program resumable)" $(EPOCHS=1000 arguments resumable "$ENGINE_DIR/commands") || return 0
    refuse "already" submit "$name" -- "$(program regression)" || true
    until_shown "^$name +RUNNING" jobs list || return 0
    until_shown "4 ranks" jobs logs "$name" || true
    expect '^STATUS: RUNNING' jobs get "$name" || true
    expect "$name-worker-0" jobs get "$name" || true
    expect '"status": "RUNNING"' jobs get "$name" --json || true
    expect "^$name +0 +0 +RUNNING" jobs top jobs || true
    expect 'GPUs In Cluster' jobs top nodes --engine "$ENGINE" || true
    [ "$(jobs logs "$name" -t 2 | wc -l)" = 2 ] || fail "logs -t 2 are not two lines"
    # The agent of a node without rank 0 says where it has joined.
    until_shown "joined|host 0|[Rr]ank" jobs logs "$name" -i "$name-worker-0" || true
    refuse 'worker-0' jobs logs "$name" -i nobody || true
    expect stopped jobs stop "$name" || true
    expect '^STATUS: STOPPED' jobs get "$name" || true
    local left
    left=$(engine_left "$name")
    [ -z "$left" ] || fail "stop leaves $left"
    expect stopped jobs stop "$name" --forget || true
    refuse "no job" jobs get "$name" || true
    expect "submitted" submit "$name" -- "$(program mnist)" --no-such-flag || return 0
    refuse FAILED jobs wait "$name" --timeout "${LIMIT}s" || true
    expect 'FAILURE: .*exit code 2' jobs get "$name" || true
    expect 'no-such-flag' jobs get "$name" || true
    expect stopped jobs stop "$name" --forget || true
}

# A job that loses a node must resume from its checkpoint, and end with the same bits.
node_loss() {
    local name=$ENGINE-loss began=$SECONDS follower
    mkdir -p "$ENGINE_DIR/out"
    # shellcheck disable=SC2046 # words
    expect "submitted" submit "$name" --max-restarts 3 -- "$(program resumable)" $(arguments resumable "$ENGINE_DIR/out") || return 0
    jobs logs "$name" -f >"$ENGINE_DIR/out/follow" 2>&1 &
    follower=$!
    local end=$((SECONDS + LIMIT))
    until compgen -G "$ENGINE_DIR/out/checkpoints/checkpoint-*" >/dev/null || [ $SECONDS -gt $end ]; do sleep 0.1; done
    lose_node "$name" || fail "$name: no node could be taken away"
    jobs wait "$name" --timeout "${LIMIT}s" || { fail "$name"; jobs get "$name" >&2; jobs logs "$name" -t 30 >&2; }
    expect 'RESTARTS: [1-9]' jobs get "$name" || true
    timeout 20 tail --pid=$follower -f /dev/null || fail "$name: logs -f does not end"
    grep -Eq 'training begins at (epoch|step) .*[1-9]' "$ENGINE_DIR/out/follow" || fail "$name: logs -f does not show that it continued"
    compare resumable "$name" $((SECONDS - began))
    expect stopped jobs stop "$name" --forget || true
}

# A hyperparameter search runs its trials on the slots of both nodes. The image on Kubernetes lacks its program.
search() {
    local name=$ENGINE-search
    [ "$ENGINE" != kubernetes ] || return 0
    expect "submitted" jobs submit --engine "$ENGINE" --name "$name" --nodes 2 --nproc-per-node 1 "${SUBMIT[@]}" -- \
        "$(program tune_mnist)" --num-samples 4 --max-iterations 2 --limit 256 --slots 2 --out "$ENGINE_DIR/search" || return 0
    jobs wait "$name" --timeout "${LIMIT}s" || { fail "$name"; jobs logs "$name" -t 20 >&2; }
    expect 'Number of trials: 4/4 \(4 TERMINATED\)' jobs logs "$name" || true
    expect stopped jobs stop "$name" --forget || true
}

engines_end() {
    printf '%s\n' "${RESULTS[@]}"
    [ "$FAILED" = 0 ] && say passed
    exit "$FAILED"
}
