#!/usr/bin/env bash
# Hosts that are network namespaces of this machine, and their faults. To be sourced, or run as
# `lib.sh FUNCTION ARGUMENT...`.
#
# The hosts h1, h2, ... of a network NET are the namespaces NET-h1, NET-h2, ... at 10.77.0.1 and fd77::1, .2 and ::2,
# ..., on a bridge in the namespace NET-sw. A machine may have several networks, which do not see one another. NET must
# be short: the names of interfaces begin with it.

# net_possible: fails and says why if there can be no hosts.
net_possible() {
    if ! command -v ip >/dev/null; then
        echo 'there is no ip (iproute2)'
    elif [ "$(id -u)" != 0 ] || ! unshare --net true 2>/dev/null; then
        echo 'network namespaces need root'
    else
        return 0
    fi
    return 1
}

# net_up NET COUNT: creates a network of hosts.
net_up() {
    local net=$1 count=$2 i
    ip netns add "$net-sw" || return 1
    ip -n "$net-sw" link set lo up
    ip -n "$net-sw" link add br0 type bridge || return 1
    ip -n "$net-sw" addr add 10.77.0.254/24 dev br0
    ip -n "$net-sw" addr add fd77::fe/64 dev br0 nodad
    ip -n "$net-sw" link set br0 up
    net_names "$net" sw "$count"
    for i in $(seq "$count"); do
        ip netns add "$net-h$i" || return 1
        ip -n "$net-h$i" link set lo up
        ip link add "$net-v$i" netns "$net-sw" type veth peer name eth0 netns "$net-h$i" || return 1
        ip -n "$net-sw" link set "$net-v$i" master br0 up
        ip -n "$net-h$i" addr add "10.77.0.$i/24" dev eth0
        ip -n "$net-h$i" addr add "fd77::$i/64" dev eth0 nodad
        ip -n "$net-h$i" link set eth0 up
        net_names "$net" "h$i" "$count"
    done
}

# net_down NET: kills what runs in a network, and removes it.
net_down() {
    local net=$1 name pid
    for name in $(ip netns list 2>/dev/null | cut -d' ' -f1); do
        [[ $name = "$net-sw" || $name =~ ^"$net"-h[0-9]+$ ]] || continue
        # Everything that runs in our namespaces is ours.
        for pid in $(ip netns pids "$name" 2>/dev/null); do kill -9 "$pid" 2>/dev/null; done
        ip netns del "$name" 2>/dev/null
        rm -rf "/etc/netns/$name"
    done
}

# net_names NET NAME COUNT: writes the host file that a namespace sees.
net_names() {
    local i
    mkdir -p "/etc/netns/$1-$2"
    { echo 127.0.0.1 localhost; for i in $(seq "$3"); do echo "10.77.0.$i $(net_name "$i")"; done; } \
        >"/etc/netns/$1-$2/hosts"
}

# net_name NUMBER: prints the name of a host: host1 is the first, or host0 with NET_FIRST=0.
net_name() { echo "host$(($1 - 1 + ${NET_FIRST:-1}))"; }

# on NET HOST COMMAND...: replaces this shell by a command on a host, with a host name of its own.
on() {
    exec ip netns exec "$1-$2" unshare --uts sh -c 'hostname "$0"; exec "$@"' "$(net_name "${2#h}")" "${@:3}"
}

# strike NET HOST FAULT: lets a host or its link fail; `mend` and `heal` undo it.
strike() {
    local net=$1 host=$2 link="$1-v${2#h}" pids
    case $3 in
    # Kills every process of the host at once: all are stopped first, since a launcher whose pid comes after its
    # rank's would see the rank die, and report it, before it is killed.
    kill)
        pids=$(ip netns pids "$net-$host")
        xargs -r kill -STOP <<<"$pids" 2>/dev/null || true
        xargs -r kill -9 <<<"$pids" 2>/dev/null || true
        ;;
    # Takes its link down, and up again.
    cut) ip -n "$net-sw" link set "$link" down ;;
    mend) ip -n "$net-sw" link set "$link" up ;;
    # Loses one packet in ten.
    loss)
        ip netns exec "$net-$host" "$(net_iptables)" -A INPUT -i eth0 -m statistic --mode random --probability 0.1 -j DROP
        ;;
    # Limits its link to 50 Mbit/s: packets queue, for up to 160 ms.
    delay)
        ip netns exec "$net-sw" tc qdisc replace dev "$link" root tbf rate 50mbit burst 16kb limit 1mb &&
            ip netns exec "$net-$host" tc qdisc replace dev eth0 root tbf rate 50mbit burst 16kb limit 1mb
        ;;
    # Restores its link.
    heal)
        strike "$net" "$host" mend
        ip netns exec "$net-sw" tc qdisc del dev "$link" root 2>/dev/null
        ip netns exec "$net-$host" tc qdisc del dev eth0 root 2>/dev/null
        [ -z "$(net_iptables)" ] || ip netns exec "$net-$host" "$(net_iptables)" -F INPUT
        ;;
    *) echo "unknown fault of a host: $3" >&2; return 2 ;;
    esac
}

# slurm_up NET DIR sw|hosts CPUS...: starts a real Slurm with a node per number of processors: n1, n2, ... The
# controller is on
# `sw`, with files in DIR. The nodes are also on `sw`, at 127.0.0.1, or on the hosts h1, h2, ... SLURM_MORE adds lines
# to its
# configuration, SLURM_AUTH options to that of authentication. Commands find it with `slurm_on`.
slurm_up() {
    local net=$1 dir=$2 where=$3 i=0 cpus host address=127.0.0.1
    shift 3
    [ "$where" = sw ] || address=10.77.0.254
    mkdir -p "$dir/slurm/state" "$dir/munge" "$dir/socket" || return 1
    chmod 755 "$dir"
    head -c 1024 /dev/urandom >"$dir/munge/key"
    chown -R munge:munge "$dir/munge" "$dir/socket" || return 1
    chmod 700 "$dir/munge" && chmod 400 "$dir/munge/key" && chmod 755 "$dir/socket"
    runuser -u munge -- /usr/sbin/munged --force --key-file="$dir/munge/key" --socket="$dir/socket/munge" \
        --pid-file="$dir/munge/pid" --log-file="$dir/munge/log" --seed-file="$dir/munge/seed" || return 1
    export SLURM_CONF=$dir/slurm.conf
    cat >"$SLURM_CONF" <<CONF
ClusterName=accel
SlurmctldHost=localhost($address)
SlurmctldPort=16817
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$dir/socket/munge${SLURM_AUTH:+,$SLURM_AUTH}
StateSaveLocation=$dir/slurm/state
SlurmdSpoolDir=$dir/slurm/%n
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd.%n.pid
SlurmctldLogFile=$dir/slurmctld.log
SlurmdLogFile=$dir/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PropagateResourceLimits=NONE
ReturnToService=2
CONF
    [ -z "${SLURM_MORE:-}" ] || printf '%s\n' "$SLURM_MORE" >>"$SLURM_CONF"
    echo 127.0.0.1 localhost >"$dir/slurm/hosts"
    for cpus; do
        i=$((i + 1))
        [ "$where" = sw ] || address=10.77.0.$i
        echo "$address n$i" >>"$dir/slurm/hosts"
        if [ "$where" = sw ]; then host=localhost; else host=n$i; fi
        echo "NodeName=n$i NodeHostname=$host NodeAddr=$address Port=$((16820 + i)) CPUs=$cpus RealMemory=500" >>"$SLURM_CONF"
    done
    echo "PartitionName=all Nodes=n[1-$i] Default=YES MaxTime=INFINITE State=UP" >>"$SLURM_CONF"
    slurm_on "$net" "$dir" sw timeout -k 5 60 /usr/sbin/slurmctld -f "$SLURM_CONF" -c || return 1
    for i in $(seq $#); do
        if [ "$where" = sw ]; then host=sw; else host=h$i; fi
        slurm_node "$net" "$dir" "$host" "$i" || return 1
    done
    for _ in $(seq 100); do
        [ "$(slurm_on "$net" "$dir" sw timeout -k 5 10 sinfo -h -t idle -o %D 2>/dev/null)" = $# ] && return
        sleep 0.1
    done
    return 1
}

# slurm_node NET DIR HOST NUMBER: starts a node, at first or after its loss.
slurm_node() {
    mkdir -p "$2/slurm/n$4"
    SLURM_CONF=$2/slurm.conf slurm_on "$1" "$2" "$3" timeout -k 5 60 /usr/sbin/slurmd -f "$2/slurm.conf" -N "n$4"
}

# slurm_on NET DIR HOST COMMAND...: runs a command with the names of nodes, a host name of its own, and the control
# groups that
# slurmd needs: `ip netns exec` hides those.
slurm_on() {
    local name=
    [ "$3" = sw ] || name=n${3#h}
    nsenter --net="/run/netns/$1-$3" unshare --mount --uts sh -c \
        '[ -z "$0" ] || hostname "$0"; mount --bind "$1" /etc/hosts && shift && exec "$@"' "$name" "$2/slurm/hosts" "${@:4}"
}

# slurm_down DIR: kills the last process, after `net_down` has killed the others.
slurm_down() {
    local pid
    pid=$(cat "$1/munge/pid" 2>/dev/null) || return 0
    ! grep -qF "$1/munge" "/proc/$pid/cmdline" 2>/dev/null || kill -9 "$pid" 2>/dev/null || true
}

# ssh_up NET DIR COUNT: starts an sshd on each host, which has its own folder at DIR/apart. SSH clients use
# DIR/ssh_config.
ssh_up() {
    local net=$1 dir=$2 i names
    mkdir -p /run/sshd "$dir/apart"
    ssh-keygen -q -t ed25519 -N '' -f "$dir/id"
    for i in $(seq "$3"); do
        ssh-keygen -q -t ed25519 -N '' -f "$dir/hostkey$i"
        names=$(ip netns exec "$net-h$i" awk -v address="10.77.0.$i" \
            '$1 == address { $1 = ""; gsub(" ", ","); print }' /etc/hosts)
        echo "fd77::$i,10.77.0.$i$names $(cut -d' ' -f1,2 "$dir/hostkey$i.pub")" >>"$dir/known_hosts"
        cat >"$dir/sshd$i.conf" <<CONF
ListenAddress 10.77.0.$i
ListenAddress fd77::$i
HostKey $dir/hostkey$i
PidFile $dir/sshd$i.pid
AuthorizedKeysFile $dir/id.pub
StrictModes no
PasswordAuthentication no
PermitRootLogin prohibit-password
UsePAM no
CONF
        ip netns exec "$net-h$i" timeout -k 5 60 unshare --uts --mount sh -c "mount -t tmpfs tmpfs $dir/apart; hostname $(net_name "$i"); exec /usr/sbin/sshd -f $dir/sshd$i.conf -E $dir/sshd$i.log" \
            || return 1
    done
    cat >"$dir/ssh_config" <<CONF
Host *
  User root
  IdentityFile $dir/id
  IdentitiesOnly yes
  UserKnownHostsFile $dir/known_hosts
  StrictHostKeyChecking yes
CONF
}

# net_iptables: prints the path of iptables, preferably of the legacy one: it needs less of the kernel.
net_iptables() { command -v iptables-legacy || command -v iptables; }

# left NET: lists the processes that run on its hosts, one per line.
left() {
    local name pid
    for name in $(ip netns list | cut -d' ' -f1 | grep -E "^$1-h[0-9]+$"); do
        for pid in $(ip netns pids "$name"); do
            echo "${name#"$1-"}: $(cat "/proc/$pid/comm" 2>/dev/null) (pid $pid)"
        done
    done
}

# install_missing PROGRAM PACKAGE...: installs the packages of missing programs, if that is possible here.
install_missing() {
    local missing=()
    while [ $# -gt 1 ]; do
        command -v "$1" >/dev/null || [ -x "/usr/sbin/$1" ] || missing+=("$2")
        shift 2
    done
    [ ${#missing[@]} = 0 ] && return
    if ! command -v apt-get >/dev/null || [ "$(id -u)" != 0 ]; then
        echo "not installed, and not to be installed here: ${missing[*]}" >&2
        return
    fi
    local package said
    timeout 120 apt-get update -qq >/dev/null 2>&1
    for package in "${missing[@]}"; do
        said=$(DEBIAN_FRONTEND=noninteractive timeout 300 apt-get install -y -qq --no-install-recommends "$package" 2>&1) ||
            echo "apt-get cannot install $package: $(tail -n 1 <<<"$said")" >&2
    done
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then "$@"; fi
