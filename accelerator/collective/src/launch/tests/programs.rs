//! Places of programs, read from the variables of launchers.

use super::*;
use crate::rendezvous::tests::registration;

/// Parses text such as `A=1 B=2` into variables.
pub(super) fn of(text: &str) -> impl Fn(&str) -> Option<String> {
    let words = text.split_whitespace();
    let vars: Vec<_> = words.map(|word| word.split_once('=').unwrap()).collect();
    move |name| {
        let found = vars.iter().find(|(key, _)| *key == name);
        found.map(|(_, value)| (*value).to_owned())
    }
}

/// Formats rank, local rank and launcher as `5/8 1/4 torchrun`, with `?` for what the ranks find out.
fn place(launch: &Launch) -> String {
    let topology = &launch.topology;
    let local = match topology.is_local_known() {
        true => format!("{}/{}", topology.local_rank(), topology.local_world_size()),
        false => "?".to_owned(),
    };
    let source = launch.source().map_or("nobody", |source| source.launcher);
    format!(
        "{}/{} {local} {source}",
        topology.rank(),
        topology.world_size()
    )
}

pub(super) fn tells(text: &str, expected: &str) -> Launch {
    let launch = Launch::from_vars(of(text)).unwrap_or_else(|error| panic!("{text}: {error}"));
    assert_eq!(place(&launch), expected, "{text}");
    launch
}

pub(super) fn refuses(text: &str, parts: &[&str]) {
    let error = Launch::from_vars(of(text)).expect_err(text);
    assert!(error.is_topology(), "{text}: {error}");
    for part in parts {
        assert!(
            error.to_string().contains(part),
            "{text}: {part:?} in {error}"
        );
    }
}

pub(super) fn noticed(launch: &Launch) -> Vec<&'static str> {
    launch
        .noticed()
        .iter()
        .map(|source| source.variable)
        .collect()
}

pub(super) fn address(launch: &Launch) -> String {
    launch.rendezvous.as_ref().unwrap().to_string()
}

/// Returns the registrations of eight ranks that know only their hosts.
fn on_hosts(hosts: [&str; 8]) -> Vec<Registration> {
    let rank = |(rank, host): (usize, &str)| Registration {
        host: host.to_owned(),
        boot: Some("1".to_owned()),
        ..registration(rank, 8)
    };
    hosts.into_iter().enumerate().map(rank).collect()
}

const TORCHRUN: &str = "RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 GROUP_RANK=1 GROUP_WORLD_SIZE=2 \
                        TORCHELASTIC_RUN_ID=j MASTER_ADDR=h MASTER_PORT=29500";
pub(super) const AT: &str = "MASTER_ADDR=h MASTER_PORT=29500";
const OPEN_MPI: &str = "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 \
                        OMPI_COMM_WORLD_LOCAL_SIZE=2 OMPI_COMM_WORLD_NODE_RANK=1";

/// Returns the variables of a task in a Slurm step: hosts, tasks, tasks per node, and this task's place.
pub(super) fn step(
    hosts: &str,
    tasks: usize,
    per_node: &str,
    [task, local, node]: [usize; 3],
) -> String {
    format!(
        "SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_STEP_NODELIST={hosts} SLURM_STEP_NUM_TASKS={tasks} \
         SLURM_STEP_TASKS_PER_NODE={per_node} SLURM_PROCID={task} SLURM_LOCALID={local} SLURM_NODEID={node}"
    )
}

#[test]
fn torchruns_workers_are_told_their_place() {
    tells(TORCHRUN, "5/8 1/4 torchrun");
    let slurm = "SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2";
    let launch = tells(&format!("{TORCHRUN} {slurm}"), "5/8 1/4 torchrun");
    assert_eq!(noticed(&launch), ["SLURM_PROCID"]);
    // The agent of torchrun has the last word about MPI's place.
    let launch = tells(&format!("{TORCHRUN} {OPEN_MPI}"), "5/8 1/4 torchrun");
    assert_eq!(noticed(&launch), ["OMPI_COMM_WORLD_RANK"]);
    let ours = "RANK=0 WORLD_SIZE=1 ACCEL_STORE=launcher PMI_RANK=1 PMI_SIZE=2";
    tells(ours, "0/1 0/1 accel-launch");
}

#[test]
fn a_local_rank_without_the_size_is_found_out() {
    let launch = tells(
        &format!("RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 {AT}"),
        "5/8 ? RANK and WORLD_SIZE",
    );
    // The sixth rank is the second on its host.
    let met = launch.met(&on_hosts(["a", "a", "a", "a", "b", "b", "b", "b"]));
    assert_eq!(met.unwrap().to_string(), "rank 5 of 8 (local 1 of 4)");
    let met = launch.met(&on_hosts(["a", "a", "a", "a", "a", "b", "b", "b"]));
    let error = met.unwrap_err();
    assert!(error.to_string().contains("its local rank is 1"), "{error}");
    // If all ranks are on one host, the local rank is the rank.
    let near = "MASTER_ADDR=127.0.0.1 MASTER_PORT=29500";
    tells(
        &format!("RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 {near}"),
        "1/2 1/2 RANK and WORLD_SIZE",
    );
    refuses(
        &format!("RANK=1 WORLD_SIZE=2 LOCAL_RANK=0 {near}"),
        &["LOCAL_RANK is 0", "LOCAL_WORLD_SIZE is not set"],
    );
}

#[test]
fn a_bare_rank_that_contradicts_mpi_is_an_error() {
    let mpi = "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4";
    refuses(
        &format!("RANK=3 WORLD_SIZE=4 {AT} {mpi}"),
        &["RANK is 3", "OMPI_COMM_WORLD_RANK is 1", "unset"],
    );
    refuses(
        "RANK=0 WORLD_SIZE=1 PMI_RANK=0 PMI_SIZE=2",
        &["PMI_SIZE is 2"],
    );
    let launch = tells(
        &format!("RANK=1 WORLD_SIZE=4 {AT} {mpi}"),
        "1/4 ? RANK and WORLD_SIZE",
    );
    assert_eq!(noticed(&launch), ["OMPI_COMM_WORLD_RANK"]);
    // A user may start ranks of their own in a Slurm step.
    tells(
        "RANK=0 WORLD_SIZE=1 SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2",
        "0/1 0/1 RANK and WORLD_SIZE",
    );
}

#[test]
fn processes_of_mpi_are_told_their_place() {
    let pmix = "PMIX_NAMESPACE=prterun-n0-7@1 PMIX_RANK=3 PMIX_VERSION=5.0.9";
    let launch = tells(
        &format!("{OPEN_MPI} {pmix} SLURM_PROCID=1 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2"),
        "3/4 1/2 Open MPI",
    );
    assert_eq!(noticed(&launch), ["SLURM_PROCID"]);
    assert!(launch.rendezvous.is_none());
    assert_eq!(launch.exchange.as_ref().unwrap().wire.name(), "PMIx");
    let settings = launch.settings().iter();
    assert!(settings.clone().any(|x| x.value.contains("through PMIx")));
    // The ranks alternate between the hosts.
    let by_node = OPEN_MPI.replace("WORLD_RANK=3", "WORLD_RANK=2");
    tells(&format!("{by_node} {pmix}"), "2/4 1/2 Open MPI");
    refuses(
        OPEN_MPI,
        &["OMPI_COMM_WORLD_RANK=3", "PMIX_NAMESPACE", "MASTER_ADDR"],
    );
    let launch = tells(&format!("{OPEN_MPI} {AT}"), "3/4 1/2 Open MPI");
    assert!(launch.exchange.is_none());
    assert_eq!(address(&launch), "h:29500");
    tells(
        "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1",
        "0/1 0/1 Open MPI",
    );
    refuses(
        "OMPI_COMM_WORLD_SIZE=two",
        &["OMPI_COMM_WORLD_SIZE is \"two\""],
    );
    refuses(
        "OMPI_COMM_WORLD_SIZE=2",
        &["OMPI_COMM_WORLD_RANK is not set"],
    );

    let hydra = "PMI_RANK=1 PMI_SIZE=4 PMI_FD=6 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2";
    let launch = tells(hydra, "1/4 1/2 PMI");
    assert_eq!(launch.exchange.as_ref().unwrap().wire.name(), "PMI");
    // `srun --mpi=pmi2` gives no local rank.
    let launch = tells(
        &format!(
            "{} PMI_RANK=1 PMI_SIZE=2 PMI_FD=9",
            step("n[1-2]", 2, "1(x2)", [1, 0, 1])
        ),
        "1/2 ? PMI",
    );
    assert_eq!(noticed(&launch), ["SLURM_PROCID"]);
    refuses(
        "PMI_RANK=1 PMI_SIZE=4",
        &["PMI_RANK=1", "PMI_FD", "MASTER_ADDR"],
    );
    refuses("PMI_RANK=1", &["PMI_SIZE is not set"]);
    refuses(
        "PMI_PORT=n0:4567 PMI_ID=3",
        &["PMI_PORT=n0:4567", "PMI_ID=3", "from_env"],
    );
    refuses(
        "PMIX_NAMESPACE=job-7 PMIX_RANK=0",
        &["PMIX_RANK=0", "train alone"],
    );
}

#[test]
fn ranks_of_open_mpi_on_one_host_meet_without_asking() {
    let near = OPEN_MPI.replace("LOCAL_SIZE=2", "LOCAL_SIZE=4");
    let at = |more: &str| {
        let launch = tells(&format!("{near} {more}"), "3/4 1/4 Open MPI");
        let store = launch.rendezvous.unwrap();
        assert_eq!(store.host(), "127.0.0.1");
        assert!((21_000..29_000).contains(&store.port()), "{}", store.port());
        (store.port(), store.job)
    };
    let four = "PMIX_NAMESPACE=2861105153 OMPI_MCA_ess_base_jobid=2861105153 OMPI_MCA_orte_hnp_uri=7.0;tcp://a:1";
    assert_eq!(at(four), at(four));
    assert_eq!(at(four).1, "ompi-2861105153");
    // Another `mpirun` had the same process id on another day.
    assert_ne!(at(four).0, at(&four.replace("a:1", "a:2")).0);
    assert_eq!(
        at("PMIX_NAMESPACE=prterun-n0-7@1 MASTER_PORT=21999").0,
        21_999
    );
}

#[test]
fn pods_are_no_ranks_where_an_agent_was_to_start_several() {
    let pods = "RANK=1 WORLD_SIZE=8 PET_NNODES=2 PET_NPROC_PER_NODE=4 PET_NODE_RANK=1";
    refuses(
        &format!("{pods} {AT}"),
        &["PET_NPROC_PER_NODE=4", "accel-launch"],
    );
    let one_each = "RANK=1 WORLD_SIZE=2 PET_NNODES=2 PET_NPROC_PER_NODE=auto PET_NODE_RANK=1";
    let launch = tells(&format!("{one_each} {AT}"), "1/2 0/1 RANK and WORLD_SIZE");
    assert_eq!(noticed(&launch), ["PET_NNODES"]);
    // A process that an agent started has a local rank.
    tells(
        &format!("{pods} LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 {AT}"),
        "1/8 0/1 RANK and WORLD_SIZE",
    );
    for text in [
        "PET_NNODES=2 PET_NODE_RANK=1 PET_NPROC_PER_NODE=auto PET_MASTER_ADDR=h PET_MASTER_PORT=1",
        "PET_NNODES=1:4 PET_RDZV_ENDPOINT=worker-0:23456",
        "PET_NNODES=1 PET_NPROC_PER_NODE=8",
    ] {
        refuses(
            text,
            &["PET_NNODES=", "accel-launch", "RANK=0 and WORLD_SIZE=1"],
        );
    }
    tells(
        "PET_NNODES=1 PET_NODE_RANK=0 PET_NPROC_PER_NODE=1 PET_STANDALONE=",
        "0/1 0/1 nobody",
    );
    tells("PET_NNODES=1:1 PET_NPROC_PER_NODE=auto", "0/1 0/1 nobody");
    tells("KUBERNETES_SERVICE_HOST=10.0.0.1", "0/1 0/1 nobody");
}

#[test]
fn the_master_pod_of_an_old_operator_is_reached_by_others() {
    let master = "MASTER_ADDR=localhost MASTER_PORT=23456 RANK=0 WORLD_SIZE=2";
    let pod = "KUBERNETES_SERVICE_HOST=10.0.0.1";
    let launch = tells(&format!("{master} {pod}"), "0/2 ? RANK and WORLD_SIZE");
    assert!(launch.rendezvous.unwrap().is_in_network());
    // Anywhere else, this is a job on one host.
    let launch = tells(master, "0/2 0/2 RANK and WORLD_SIZE");
    assert!(!launch.rendezvous.unwrap().is_in_network());
}

#[test]
fn a_launcher_is_refused_where_another_has_started_several() {
    let task = step("n[1-2]", 2, "1(x2)", [1, 0, 1]);
    for (text, part) in [
        (OPEN_MPI, "OMPI_COMM_WORLD_SIZE=4"),
        ("PMI_RANK=0 PMI_SIZE=2", "PMI_SIZE=2"),
        ("PMI_PORT=n0:4567 PMI_ID=0", "PMI_ID=0"),
        ("PMIX_RANK=0", "PMIX_RANK=0"),
        (&*task, "SLURM_STEP_NUM_TASKS=2"),
        ("PET_NNODES=2", "PET_NNODES=2"),
    ] {
        let error = check_alone(of(text)).unwrap_err();
        assert!(
            error.is_topology() && error.to_string().contains(part),
            "{text}: {error}"
        );
        check_alone(of(&format!("{text} RANK=0"))).unwrap();
    }
    for text in [
        "",
        // The body of a batch script may start a launcher.
        "SLURM_JOB_ID=7 SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_NNODES=2",
        "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1 SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2",
    ] {
        check_alone(of(text)).unwrap();
    }
}
