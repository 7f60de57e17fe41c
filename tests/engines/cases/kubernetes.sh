#!/usr/bin/env bash
# Kubernetes: a real cluster of two nodes from tests/engines/kubernetes. Nodes are network namespaces of this machine
# and
# see its files, so a volume is a folder.

CASES=$PWD/tests/engines/cases
CLUSTER=
KUBERNETES=$PWD/tests/engines/kubernetes

engine_missing() {
    local name servers=${ENGINE_TESTS_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/accelerate-tests}
    [ "$EUID" = 0 ] || { echo 'its nodes need root'; return; }
    for name in etcd containerd docker-registry kubectl git; do
        [ -n "$(type -P $name)" ] || { echo "there is no $name: tests/engines/install kubernetes"; return; }
    done
    compgen -G "$servers/kubernetes-*/kubelet" >/dev/null || echo 'its servers are not built: tests/engines/install kubernetes'
}

here() { "$KUBERNETES" in "$CLUSTER" "$@"; }
kube() { here timeout 30 kubectl "$@"; }
program() { echo "/app/$1"; }

engine_up() {
    CLUSTER=$ENGINE_DIR/cluster
    PREFIX=${PREFIX:-ak$$} "$KUBERNETES" up "$CLUSTER" || return 1
    REGISTRY=$(here printenv ENGINE_REGISTRY)
    # Replaces the DNS of a cluster.
    here setsid "$CASES/kubernetes-dns.py" "${REGISTRY%:*}" "$CLUSTER" >"$CLUSTER/log/dns" 2>&1 </dev/null &
    local node
    for node in 1 2; do
        printf 'nameserver %s\nsearch default.svc.cluster.local team.svc.cluster.local\n' "${REGISTRY%:*}" \
            >"$CLUSTER/node$node/resolv.conf"
    done
    images || return 1
    sed "s|\$ENGINE_DIR|$ENGINE_DIR|" "$CASES/kubernetes.yaml" | kube apply -f - >/dev/null || return 1
    SUBMIT=(--image "$REGISTRY/team/app:1" --data "training-data:$ENGINE_DIR")
}

# Makes an image with the programs, and one with git.
images() {
    local app=$ENGINE_DIR/app git=$ENGINE_DIR/git name library
    mkdir -p "$app/usr/local/bin" "$app/app" "$git/usr/bin" "$git/lib64"
    cp "$LAUNCHER" "$app/usr/local/bin/accel-launch"
    for name in regression mnist resumable; do cp "$EXAMPLES/$name" "$app/app/"; done
    here "$PWD/tests/engines/image" --push "http://$REGISTRY" team/app:1 "$app" --from base:1 >/dev/null || return 1
    cp "$(type -P git)" "$git/usr/bin/"
    for library in $(ldd "$(type -P git)" | grep -oE '/[^ ]+\.so[^ ]*'); do install -D "$library" "$git$library"; done
    here "$PWD/tests/engines/image" --push "http://$REGISTRY" team/git:1 "$git" --from base:1 >/dev/null
}

engine_down() { [ -z "$CLUSTER" ] || "$KUBERNETES" down "$CLUSTER"; }

lose_node() {
    local node
    node=$(kube get pods -l "accel-jobs/job=$1,accel-jobs/node=1" -o 'jsonpath={.items[0].spec.nodeName}')
    "$KUBERNETES" lose "$CLUSTER" "${node#node}" || return 1
    until_shown "$1-worker-0: .*$node .*NodeLost" jobs get "$1" || return 1
    "$KUBERNETES" return "$CLUSTER" "${node#node}"
}

engine_left() {
    kube get jobs,pods,secrets,services,configmaps,deployments,pytorchjobs,trainjobs -A -l "accel-jobs/job=$1" -o name
}

nothing_left() {
    local left
    left=$(engine_left "$1")
    [ -z "$left" ] || fail "$1 leaves $left"
}

# Submits a job with one rank per node.
one_rank() { jobs submit --engine kubernetes --name "$1" "${SUBMIT[@]}" "${@:2}"; }

# Runs a command as a user of the cluster, with the kubeconfig of that name.
as() { here env KUBECONFIG="$CLUSTER/$1.kubeconfig" timeout "$LIMIT" "$JOBS" "${@:2}"; }

engine_tests() {
    local name
    for name in image course out_of_memory waits refusals rights kubeflow code tensorboard speed; do
        say "kubernetes: $name"
        "kubernetes_$name"
    done
}

# Submits a program of this machine; the submission makes and pushes its image.
kubernetes_image() {
    local build=(here env PATH="$(dirname "$LAUNCHER"):$PATH" timeout "$LIMIT" "$JOBS" submit --engine kubernetes --nodes 2
        --nproc-per-node 2 --env ACCEL_TRANSPORT=tcp --env RAYON_NUM_THREADS=1 --base-image "$REGISTRY/base:1"
        --push "$REGISTRY/team/built:1" --insecure-registry "$REGISTRY")
    local began
    expect "image: $REGISTRY/team/built@sha256:" "${build[@]}" --name built --dry-run -- "$EXAMPLES/regression"
    refuse 'a word each' "${build[@]}" --name built -- 'echo a b'
    began=$(date +%s%N)
    expect "pushed as $REGISTRY/team/built:1" "${build[@]}" --name built -- "$EXAMPLES/regression" || return 0
    RESULTS+=("kubernetes: from a built program: image made, pushed and submitted after $(since "$began") ms")
    until_shown '(Running|Succeeded) (Running|Succeeded)' pod_phases built && RESULTS+=("kubernetes:   both pods run after $(since "$began") ms")
    until_shown '4 ranks' jobs logs built && RESULTS+=("kubernetes:   four ranks print after $(since "$began") ms")
    jobs wait built --timeout "${LIMIT}s" || { fail "an image that was made does not run"; jobs get built >&2; }
    jobs logs built >"$ENGINE_DIR/out/regression.out"
    compare regression built 0
    expect stopped jobs stop built --forget
    nothing_left built
}

# Runs the commands of docs/kubernetes.md with this registry. This server has no Indexed Jobs, so there is a Job per
# node.
kubernetes_course() {
    "$KUBERNETES" gpus "$CLUSTER" 1 2 && "$KUBERNETES" gpus "$CLUSTER" 2 2
    here "$CASES/course.py" "$PWD/docs/kubernetes.md" "$JOBS" "registry.example/team/mnist:1=$REGISTRY/team/app:1" \
        'job.batch/mnist-dist created=job.batch/mnist-dist-0 created' '=job.batch/mnist-dist-1 created
' >"$ENGINE_DIR/course" 2>&1 || { fail "the course of docs/kubernetes.md"; tail -n 30 "$ENGINE_DIR/course" >&2; }
    nothing_left mnist-dist
}

# Rank 1, on the other node, uses more memory than its pod has.
kubernetes_out_of_memory() {
    expect submitted one_rank memory --nodes 2 --memory 64Mi -- \
        'if [ "$RANK" = 1 ]; then x=0123456789abcdef; while :; do x=$x$x; done; else sleep 100; fi' || return 0
    refuse FAILED jobs wait memory --timeout 60s
    expect 'FAILURE: memory-worker-0: .*OOMKilled' jobs get memory
    expect stopped jobs stop memory --forget
    nothing_left memory
}

# Jobs that wait must say why.
kubernetes_waits() {
    expect submitted submit large --gpus 8 -- /app/regression
    until_shown 'Unschedulable: .*Insufficient nvidia.com/gpu' jobs get large
    expect stopped jobs stop large --forget
    until_shown '^0/4 \(0%\)' jobs top nodes --engine kubernetes
    expect submitted submit gpus --gpus 1 -- 'sleep 100'
    until_shown '^2/4 \(50%\)' jobs top nodes --engine kubernetes
    until_shown '^gpus +2 +2 +RUNNING +job' jobs top jobs
    expect stopped jobs stop gpus --forget
    expect submitted jobs submit --engine kubernetes --name nowhere --image "$REGISTRY/team/none:1" -- /app/regression
    until_shown '(ErrImagePull|ImagePullBackOff).*team/none:1' jobs get nowhere
    expect stopped jobs stop nowhere --forget
    expect submitted submit data --data "nothing:/nothing" -- /app/regression
    until_shown 'persistentvolumeclaim "nothing" not found' jobs get data
    expect stopped jobs stop data --forget
    expect submitted submit late --time 3s -- 'sleep 100'
    refuse FAILED jobs wait late --timeout 60s
    expect 'DeadlineExceeded' jobs get late
    expect stopped jobs stop late --forget
    for name in large gpus nowhere data late; do nothing_left "$name"; done
}

kubernetes_refusals() {
    # Another object has the name.
    kube create service clusterip --tcp=80 taken >/dev/null
    refuse 'service/taken is already in namespace default' submit taken -- /app/regression
    nothing_left taken
    refuse 'no job' jobs get taken
    kube delete service taken >/dev/null
    # The server accepts each Job but not both: the first is removed again.
    kube create quota one --hard=count/jobs.batch=1 >/dev/null
    until_shown 'count/jobs.batch: 0/1' kube get quota one
    refuse 'job.batch/half-1 does not fit the quota' submit half -- /app/regression
    nothing_left half
    kube delete quota one >/dev/null
    # Pods exceed the quota.
    kube create quota pods --hard=pods=1 >/dev/null
    until_shown 'pods: 0/1' kube get quota pods
    expect submitted submit narrow -- 'sleep 100'
    until_shown 'FailedCreate: .*exceeded quota' jobs get narrow
    expect stopped jobs stop narrow --forget
    kube delete quota pods >/dev/null
    # The server must accept what --dry-run prints.
    submit dry --dry-run -- /app/regression >"$ENGINE_DIR/dry.yaml"
    expect 'job.batch/dry-1 created' kube create --dry-run=server -f "$ENGINE_DIR/dry.yaml"
    nothing_left dry
    refuse "$(printf 'no usable context elsewhere')" jobs submit --context elsewhere --engine kubernetes --name a --image b -- c
    refuse 'has no namespace nowhere' jobs submit -n nowhere --engine kubernetes --name a --image b -- c
    sed 's/:6443/:6444/' "$CLUSTER/kubeconfig" >"$CLUSTER/closed.kubeconfig"
    refuse 'cannot be reached' as closed submit --engine kubernetes --name a --image b -- c
    sed 's/token: .*}}/token: expired}}/' "$CLUSTER/kubeconfig" >"$CLUSTER/expired.kubeconfig"
    refuse 'log in again' as expired submit --engine kubernetes --name a --image b -- c
    # A job is only looked for in its own cluster.
    expect submitted submit where -- 'sleep 100'
    refuse 'give the one that leads there by --context' as closed stop where
    expect stopped jobs stop where --forget
}

# A user without rights, and then with those that docs/kubernetes-rbac.yaml grants in one namespace.
kubernetes_rights() {
    local submit=(submit --engine kubernetes --name rights --nodes 2 --image "$REGISTRY/team/app:1")
    refuse 'forbids .*cannot create resource' as nobody "${submit[@]}" -- /app/regression
    kube apply -n team -f "$PWD/docs/kubernetes-rbac.yaml" >/dev/null
    kube create rolebinding -n team nobody --role=accel-jobs --user=nobody >/dev/null
    expect submitted as nobody "${submit[@]}" -- /app/regression
    expect 'NAMESPACE: team' as nobody get rights
    as nobody wait rights --timeout "${LIMIT}s" || fail "a user with these rights runs no job"
    expect . as nobody logs rights
    expect 'may not list nodes' as nobody top nodes --engine kubernetes
    expect '^NAME' as nobody data list --engine kubernetes
    refuse 'in namespace default' as nobody submit -n default --engine kubernetes --name other --image a -- b
    expect stopped as nobody stop rights --forget
    nothing_left rights
}

# No operator makes pods of these objects here: the server checks them against their schemas, and they are removed.
kubernetes_kubeflow() {
    local kind
    for kind in pytorchjob trainjob; do
        expect "$kind.*/of-$kind created" submit "of-$kind" --kind "$kind" --max-restarts 2 --time 1h -- /app/regression
        expect "^of-$kind +PENDING +${kind^^}" jobs list
        expect stopped jobs stop "of-$kind" --forget
        nothing_left "of-$kind"
    done
    expect 'kind: PyTorchJob' jobs submit pytorch --name arena --workers 3 --gpus 1 --image a --dry-run -- b
    refuse 'trainjob.*at most 500' jobs submit --engine kubernetes --kind trainjob --name long --image "$(printf 'a%.0s' {1..600})" -- b
    nothing_left long
    kube delete crd pytorchjobs.kubeflow.org >/dev/null
    refuse 'Kubeflow training operator' jobs submit pytorch --name none --image a -- b
    kube apply -f "$PWD/tests/engines/crds/pytorchjob.yaml" >/dev/null
}

# The program's code comes from a repository.
kubernetes_code() {
    local source=$ENGINE_DIR/source
    mkdir -p "$source"
    git init -q "$source/greeting"
    printf 'echo "greetings from $(pwd)"\n' >"$source/greeting/run.sh"
    git -C "$source/greeting" add . && git -C "$source/greeting" -c user.name=a -c user.email=a@b commit -qm a
    here setsid git daemon --base-path="$source" --export-all --listen="${REGISTRY%:*}" --reuseaddr >"$CLUSTER/log/git" 2>&1 </dev/null &
    expect submitted one_rank code --nodes 2 --working-dir=/root --sync-mode=git --sync-image "$REGISTRY/team/git:1" \
        --sync-source="git://${REGISTRY%:*}/greeting" --env=GIT_SYNC_USERNAME=ada --env=GIT_SYNC_PASSWORD=hidden -- \
        'sh /root/code/greeting/run.sh' || return 0
    jobs wait code --timeout "${LIMIT}s" || { fail "code is not brought"; jobs get code >&2; }
    expect 'greetings from /root' jobs logs code
    [ -z "$(kube get pods,jobs -l accel-jobs/job=code -o yaml | grep hidden)" ] || fail "a password is in a pod"
    expect stopped jobs stop code --forget
    nothing_left code
}

kubernetes_tensorboard() {
    refuse 'mount one there by --data' submit board --tensorboard -- 'sleep 100'
    expect 'deployment.apps/board-tensorboard created' submit board --tensorboard --logdir "$ENGINE_DIR/logs" \
        --tensorboard-image "$REGISTRY/team/none:1" -- 'sleep 100'
    expect 'kubectl port-forward -n default svc/board-tensorboard 9090:6006' jobs get board
    expect stopped jobs stop board --forget
    nothing_left board
}

# Compares the time to create the same objects with `submit` and with kubectl.
kubernetes_speed() {
    local began yaml=$ENGINE_DIR/fast.yaml command=(-- 'echo here; sleep 100')
    began=$(date +%s%N)
    submit fast "${command[@]}" >/dev/null
    RESULTS+=("kubernetes: a ready image: submitted after $(since "$began") ms")
    until_shown '(Running|Succeeded) (Running|Succeeded)' pod_phases fast && RESULTS+=("kubernetes:   both pods run after $(since "$began") ms")
    until_shown here jobs logs fast && RESULTS+=("kubernetes:   four ranks print after $(since "$began") ms")
    began=$(date +%s%N)
    expect stopped jobs stop fast --forget
    RESULTS+=("kubernetes: stopped, with nothing left, in $(since "$began") ms")

    submit fast --dry-run "${command[@]}" >"$yaml"
    began=$(date +%s%N)
    kube apply -f "$yaml" >/dev/null
    RESULTS+=("kubernetes: the same by kubectl: applied after $(since "$began") ms")
    until_shown '(Running|Succeeded) (Running|Succeeded)' pod_phases fast && RESULTS+=("kubernetes:   both pods run after $(since "$began") ms")
    until_shown here kube logs -l accel-jobs/job=fast --tail 100 &&
        RESULTS+=("kubernetes:   four ranks print after $(since "$began") ms")
    kube delete -f "$yaml" >/dev/null
}

pod_phases() { kube get pods -l "accel-jobs/job=$1" -o 'jsonpath={.items[*].status.phase}'; }

# since TIME: prints the milliseconds since TIME, in nanoseconds.
since() { echo $((($(date +%s%N) - $1) / 1000000)); }
