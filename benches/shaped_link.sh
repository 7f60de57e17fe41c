#!/usr/bin/env bash
# Runs a command as the ranks of several hosts on one machine: a network namespace per host, joined by a
# switch, with links of a chosen rate and delay. Needs root, iproute2, and a kernel with veth, bridge and
# tbf; a delay also needs netem, or python3 and tun in its place.
#
#   benches/shaped_link.sh --rate 1gbit -- target/release/train --epochs 1
#   benches/shaped_link.sh --hosts 2 --ranks-per-host 2 --rate 1gbit --delay 1ms -- ./program
#
# Each process gets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT,
# ACCEL_PORT and ACCEL_TOKEN_FILE. The exit status is that of the first rank that fails.
set -euo pipefail

usage() {
    sed -n '2,10s/^# \{0,1\}//p' "$0"
    cat <<'TEXT'

Options:
  --hosts N            hosts [2]
  --ranks-per-host N   ranks of each host [1]
  --rate RATE          what a link carries in each direction, as tc reads it, or none [1gbit]
  --delay TIME         one-way delay, in us or ms, or none [none]
  --congestion NAME    congestion control of TCP [cubic]
  --port PORT          where the ranks meet [29500]
  --pin                pin rank r to core r modulo the number of cores
TEXT
}

hosts=2 ranks=1 rate=1gbit delay=none congestion=cubic port=29500 pin=no
while [ $# -gt 0 ]; do
    case $1 in
        --hosts) hosts=$2; shift 2 ;;
        --ranks-per-host) ranks=$2; shift 2 ;;
        --rate) rate=$2; shift 2 ;;
        --delay) delay=$2; shift 2 ;;
        --congestion) congestion=$2; shift 2 ;;
        --port) port=$2; shift 2 ;;
        --pin) pin=yes; shift ;;
        -h | --help) usage; exit 0 ;;
        --) shift; break ;;
        *) break ;;
    esac
done
[ $# -gt 0 ] || { usage >&2; exit 2; }

name=accel-$$ # unique to this run
folder=$(mktemp -d)
children=()

clean() {
    trap - EXIT INT TERM
    for child in "${children[@]}"; do kill "$child" 2>/dev/null || true; done
    wait 2>/dev/null || true
    for ((host = 0; host < hosts; host++)); do ip netns del "$name-$host" 2>/dev/null || true; done
    ip netns del "$name-switch" 2>/dev/null || true
    rm -rf "$folder"
}
trap clean EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

inside() { # NAMESPACE COMMAND...
    ip netns exec "$@"
}

shape() { # NAMESPACE DEVICE
    [ "$rate" = none ] || inside "$1" tc qdisc add dev "$2" root handle 1: tbf rate "$rate" burst 128kb latency 50ms
}

relay() { # HOST: delays the packets of a host if the kernel cannot
    command -v python3 >/dev/null || { echo "a delay needs netem or python3" >&2; exit 2; }
    python3 "$(dirname "$0")/delayed_link.py" "$name-$1" "$name-switch" "port$1" "$delay" >"$folder/ready-$1" &
    children+=($!)
    until [ -s "$folder/ready-$1" ]; do
        kill -0 $! 2>/dev/null || { echo "the delayed link of host $1 cannot be made" >&2; exit 1; }
        sleep 0.05
    done
}

ip netns add "$name-switch"
inside "$name-switch" ip link add switch type bridge
inside "$name-switch" ip link set switch up
for ((host = 0; host < hosts; host++)); do
    space=$name-$host
    ip netns add "$space"
    inside "$space" ip link set lo up
    if [ "$delay" != none ] && ! inside "$space" tc qdisc add dev lo root netem delay 1ms 2>/dev/null; then
        relay "$host"
    else
        ip link add eth0 netns "$space" type veth peer name "port$host" netns "$name-switch"
    fi
    inside "$space" tc qdisc del dev lo root 2>/dev/null || true
    inside "$space" ip address add "10.77.0.$((host + 1))/24" dev eth0
    inside "$space" ip link set eth0 up
    inside "$space" ip route replace 10.77.0.0/24 dev eth0 congctl "$congestion"
    inside "$name-switch" ip link set "port$host" master switch up
    shape "$space" eth0
    shape "$name-switch" "port$host"
    if [ "$delay" != none ] && [ ! -e "$folder/ready-$host" ]; then
        parent=(root)
        [ "$rate" = none ] || parent=(parent 1:1)
        inside "$space" tc qdisc add dev eth0 "${parent[@]}" netem delay "$delay" limit 100000
    fi
done

(umask 077; head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n' >"$folder/token")
cores=$(nproc)
for ((rank = 0; rank < hosts * ranks; rank++)); do
    command=("$@")
    [ "$pin" = no ] || command=(taskset -c $((rank % cores)) "$@")
    ip netns exec "$name-$((rank / ranks))" env \
        RANK=$rank WORLD_SIZE=$((hosts * ranks)) \
        LOCAL_RANK=$((rank % ranks)) LOCAL_WORLD_SIZE="$ranks" \
        MASTER_ADDR=10.77.0.1 MASTER_PORT="$port" ACCEL_PORT="$port" \
        ACCEL_TOKEN_FILE="$folder/token" "${command[@]}" &
    pids[rank]=$!
    children+=($!)
done

status=0
for pid in "${pids[@]}"; do
    code=0
    wait "$pid" || code=$?
    [ $status -ne 0 ] || status=$code
done
exit $status
