#!/usr/bin/env bash
# The parts that engines share: their folder, their namespaces, and their shutdown. To be sourced.
. "$(dirname "${BASH_SOURCE[0]}")/../hosts/lib.sh"

CACHE=${ENGINE_TESTS_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/accelerate-tests}
DEBIAN_MIRROR=${DEBIAN_MIRROR:-http://deb.debian.org/debian}
START_LIMIT=${START_LIMIT:-300}         # seconds until an engine is up
LIFETIME=${LIFETIME:-3600}  # seconds until it is taken down in any case

# The version in Debian 12, and the number of our changes to it.
KUBERNETES=$CACHE/kubernetes-1.20.2-1
KUBERNETES_SERVERS='kube-apiserver kube-controller-manager kube-scheduler kubelet'
RAY=$CACHE/ray

say() { printf '%s\n' "$*" >&2; }

# begin DIR: makes a new folder and the name of its network. From here on, a failure or an interruption takes both down.
begin() {
    local why
    why=$(net_possible) || { say "no engine can run here: $why"; exit 1; }
    DIR=$(realpath -m "$1")
    if [ -e "$DIR" ] && [ -n "$(ls -A "$DIR")" ]; then
        say "$DIR is not empty"
        exit 2
    fi
    mkdir -p "$DIR/log"
    chmod 755 "$DIR"
    NET=${PREFIX:-ae$$}
    echo "$NET" >"$DIR/net"
    UP=
    trap 'code=$?; [ -n "$UP" ] || { [ $code = 130 ] || logs; end; }; exit $code' EXIT
    trap 'exit 130' INT TERM HUP
    setsid bash -c 'sleep "$1" && exec "$0" down "$2"' "$SELF" "$LIFETIME" "$DIR" >/dev/null 2>&1 </dev/null &
    echo $! >"$DIR/keeper.pid"
    DEADLINE=$((SECONDS + START_LIMIT))
}

# done_: notes that the engine is up.
done_() { UP=1; }

# again DIR: finds an engine that is up.
again() {
    DIR=$(realpath -m "$1")
    NET=$(cat "$DIR/net" 2>/dev/null) || { say "there is no engine in $DIR"; exit 2; }
    DEADLINE=$((SECONDS + START_LIMIT))
}

# until_ WHAT COMMAND...: waits until the command succeeds, or until the deadline.
until_() {
    local what=$1
    shift
    until "$@" >/dev/null 2>&1; do
        if [ $SECONDS -ge $DEADLINE ]; then
            say "not in time: $what"
            return 1
        fi
        sleep 0.1
    done
}

# inside HOST COMMAND...: runs a command in the network of a host, or of `sw`. `ip netns exec` would hide the control
# groups.
inside() { nsenter --net="/run/netns/$NET-$1" "${@:2}"; }

# daemon HOST NAME COMMAND...: starts a daemon in the network of a host. It ends with its namespace.
daemon() {
    setsid nsenter --net="/run/netns/$NET-$1" "${@:3}" >>"$DIR/log/$2" 2>&1 </dev/null &
    echo $! >"$DIR/$2.pid"
    # The shell must not report its end.
    disown
}

# logs: prints the ends of the logs, after a failure.
logs() {
    local log
    for log in "$DIR"/log/*; do
        [ -s "$log" ] || continue
        say "--- ${log##*/}"
        tail -n "${LOG_LINES:-5}" "$log" | cut -c -300 >&2
    done
}

# stop_keeper: stops the process that would take the engine down.
stop_keeper() {
    local pid
    pid=$(cat "$DIR/keeper.pid" 2>/dev/null) || return 0
    # The keeper may be the process that runs this now.
    [ "$pid" = $$ ] || ! grep -qF "$DIR" "/proc/$pid/cmdline" 2>/dev/null || kill -- "-$pid" 2>/dev/null || true
}

# end: takes the engine down.
end() {
    set +e
    trap '' INT TERM HUP
    stop_keeper
    if declare -F end_more >/dev/null; then end_more; fi
    net_down "$NET"
    if [ "${KEEP:-0}" = 1 ]; then say "logs: $DIR/log"; else rm -rf "$DIR"; fi
    set -e
}

# engine COMMAND ARGUMENT...: the commands of every engine. `run` is up, a command in the network `sw`, and down.
engine() {
    case ${1:-} in
    up)
        begin "${2:?a folder}"
        up "${@:3}"
        done_
        ;;
    down)
        DIR=$(realpath -m "${2:?a folder}")
        [ -e "$DIR/net" ] || exit 0
        again "$DIR"
        end
        ;;
    run)
        local parent code=0
        parent=$(mktemp -d "${TMPDIR:-/tmp}/ae.XXXXXX")
        chmod 755 "$parent"
        "$SELF" up "$parent/e" || { code=$?; rm -rf "$parent"; exit $code; }
        trap '"$SELF" down "$parent/e"; rm -rf "$parent"' EXIT
        trap 'exit 130' INT TERM HUP
        again "$parent/e"
        (
            set -a
            . "$DIR/env"
            set +a
            inside sw timeout -k 10 "$LIFETIME" "${@:2}"
        ) || code=$?
        exit $code
        ;;
    in)
        again "${2:?a folder}"
        set -a
        . "$DIR/env"
        set +a
        inside sw "${@:3}"
        ;;
    lose | return | cut | mend)
        again "${2:?a folder}"
        case $1 in
        lose) lose "${3:?a node}" ;;
        return) return_ "${3:?a node}" ;;
        cut | mend) strike "$NET" "h${3:?a node}" "$1" ;;
        esac
        ;;
    *)
        sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$SELF" >&2
        exit 2
        ;;
    esac
}
