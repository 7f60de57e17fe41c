//! Launches read from variables.

mod agents;
mod programs;
mod slurm;

use accelerator_host as env;

use super::*;

fn launch(vars: &[(&str, &str)]) -> Result<Launch> {
    Launch::from_vars(|name| {
        vars.iter()
            .find(|(key, _)| *key == name)
            .map(|(_, value)| (*value).to_owned())
    })
}

const JOB: [(&str, &str); 4] = [
    ("RANK", "1"),
    ("WORLD_SIZE", "4"),
    ("MASTER_ADDR", "127.0.0.1"),
    ("MASTER_PORT", "29500"),
];

fn job(more: &[(&'static str, &'static str)]) -> Result<Launch> {
    let mut vars = JOB.to_vec();
    for (name, value) in more {
        vars.retain(|(key, _)| key != name);
        if *value != "(unset)" {
            vars.push((name, value));
        }
    }
    launch(&vars)
}

#[test]
fn nothing_set_is_a_world_of_one() {
    let launch = launch(&[]).unwrap();
    assert_eq!(launch.topology, Topology::single());
    assert!(launch.rendezvous.is_none());
    assert!(
        launch
            .settings()
            .iter()
            .all(|x| x.origin != Origin::Variable("RANK"))
    );
}

#[test]
fn a_variable_that_is_empty_is_not_set() {
    let names = VARIABLES.into_iter().chain([
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_USE_AGENT_STORE",
    ]);
    let empty: Vec<_> = names.map(|name| (name, "")).collect();
    let settings = |launch: Launch| launch.settings().to_vec();
    let (empty, unset) = (launch(&empty).unwrap(), launch(&[]).unwrap());
    assert_eq!(settings(empty), settings(unset));
    let others = [
        ("LOCAL_RANK", ""),
        ("ACCEL_PORT", ""),
        ("ACCEL_STORE", ""),
        ("ACCEL_JOB", ""),
    ];
    assert_eq!(settings(job(&others).unwrap()), settings(job(&[]).unwrap()));
    let error = job(&[("WORLD_SIZE", "")]).unwrap_err().to_string();
    assert!(error.contains("WORLD_SIZE is not set"), "{error}");
}

#[test]
fn a_complete_launch_is_read_with_its_origins() {
    let launch = job(&[("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "2")]).unwrap();
    assert_eq!(launch.topology.to_string(), "rank 1 of 4 (local 1 of 2)");
    let rendezvous = launch.rendezvous.as_ref().unwrap();
    assert_eq!(rendezvous.to_string(), "127.0.0.1:29500");
    let origin = |name| {
        let setting = launch.settings().iter().find(|x| x.name == name).unwrap();
        (setting.value.clone(), setting.origin)
    };
    assert_eq!(origin("rank"), ("1".to_owned(), Origin::Variable("RANK")));
    assert_eq!(
        origin("store port"),
        ("29500".to_owned(), Origin::Variable("MASTER_PORT"))
    );
    assert_eq!(origin("store"), ("rank0".to_owned(), Origin::Default));
}

#[test]
fn restarts_and_liveness_are_read() {
    let first = job(&[]).unwrap();
    assert_eq!((first.restart(), first.max_restarts()), (0, None));
    assert_eq!(first.liveness_timeout, None);
    let later = job(&[
        ("ACCEL_RESTART", "2"),
        ("ACCEL_MAX_RESTARTS", "3"),
        ("ACCEL_LIVENESS_TIMEOUT", "0.25"),
    ]);
    let later = later.unwrap();
    assert_eq!((later.restart(), later.max_restarts()), (2, Some(3)));
    assert_eq!(later.liveness_timeout, Some(Duration::from_millis(250)));
    let settings = later.settings();
    let origin = Origin::Variable("ACCEL_LIVENESS_TIMEOUT");
    assert!(
        settings
            .iter()
            .any(|x| x.origin == origin && x.value == "0.25 s")
    );
}

#[test]
fn the_store_keeps_clear_of_torchruns_agent() {
    let port = |launch: Launch| launch.rendezvous.unwrap().port();
    let torchrun = ("TORCHELASTIC_USE_AGENT_STORE", "True");
    assert_eq!(port(job(&[torchrun]).unwrap()), 29501);
    assert_eq!(
        port(job(&[torchrun, ("ACCEL_PORT", "7000")]).unwrap()),
        7000
    );
    assert_eq!(
        port(job(&[("TORCHELASTIC_USE_AGENT_STORE", "False")]).unwrap()),
        29500
    );
    assert!(job(&[torchrun, ("MASTER_PORT", "65535")]).is_err());
}

#[test]
fn the_place_on_the_host_is_derived_or_found_later() {
    let near = job(&[]).unwrap();
    assert_eq!(near.topology.to_string(), "rank 1 of 4 (local 1 of 4)");
    let far = job(&[("MASTER_ADDR", "10.0.0.1")]).unwrap();
    assert!(!far.topology.is_local_known());
    let settings = far.settings().iter();
    let local = settings.filter(|x| x.name.starts_with("local "));
    assert!(
        local.eq(far
            .settings()
            .iter()
            .filter(|x| x.value == "found when the ranks meet"))
    );
}

#[test]
fn what_is_malformed_or_contradictory_is_named() {
    type Vars = [(&'static str, &'static str)];
    let cases: [(&Vars, &[&str]); 26] = [
        (
            &[("RANK", "banana")],
            &["RANK", "\"banana\"", "whole number"],
        ),
        (&[("RANK", " ")], &["RANK", "\" \""]),
        (&[("RANK", "-1")], &["RANK", "\"-1\""]),
        (
            &[("RANK", "4")],
            &["RANK is 4", "WORLD_SIZE is 4", "0 to 3"],
        ),
        (
            &[("RANK", "(unset)")],
            &["WORLD_SIZE is 4", "RANK is not set"],
        ),
        (
            &[("WORLD_SIZE", "(unset)")],
            &["RANK is 1", "WORLD_SIZE is not set"],
        ),
        (&[("WORLD_SIZE", "0")], &["WORLD_SIZE", "at least 1"]),
        (&[("WORLD_SIZE", "two")], &["WORLD_SIZE", "\"two\""]),
        (&[("MASTER_ADDR", "(unset)")], &["MASTER_ADDR is not set"]),
        (&[("MASTER_ADDR", " ")], &["MASTER_ADDR is empty"]),
        (
            &[("MASTER_PORT", "(unset)")],
            &["ACCEL_PORT", "MASTER_PORT"],
        ),
        (&[("MASTER_PORT", "0")], &["MASTER_PORT", "1 to 65535"]),
        (&[("ACCEL_PORT", "70000")], &["ACCEL_PORT", "\"70000\""]),
        (
            &[("LOCAL_WORLD_SIZE", "2")],
            &["LOCAL_WORLD_SIZE is 2", "LOCAL_RANK is not set"],
        ),
        (
            &[("LOCAL_RANK", "2"), ("LOCAL_WORLD_SIZE", "2")],
            &["LOCAL_RANK is 2", "0 to 1"],
        ),
        (
            &[("LOCAL_RANK", "2"), ("LOCAL_WORLD_SIZE", "3")],
            &["LOCAL_RANK is 2", "RANK is 1"],
        ),
        (
            &[("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "5")],
            &["LOCAL_WORLD_SIZE is 5"],
        ),
        (&[("ACCEL_STORE", "rank1")], &["ACCEL_STORE", "\"rank1\""]),
        (
            &[("ACCEL_TRANSPORT", "mpi")],
            &["ACCEL_TRANSPORT", "\"mpi\""],
        ),
        (
            &[("ACCEL_INSECURE", "maybe")],
            &["ACCEL_INSECURE", "\"maybe\""],
        ),
        (
            &[("ACCEL_LIVENESS_TIMEOUT", "0")],
            &["ACCEL_LIVENESS_TIMEOUT", "\"0\"", "from 0.1"],
        ),
        (
            &[("ACCEL_LIVENESS_TIMEOUT", "0.001")],
            &["ACCEL_LIVENESS_TIMEOUT", "\"0.001\""],
        ),
        (
            &[("ACCEL_LIVENESS_TIMEOUT", "-1")],
            &["ACCEL_LIVENESS_TIMEOUT", "\"-1\""],
        ),
        (
            &[("ACCEL_LIVENESS_TIMEOUT", "5s")],
            &["ACCEL_LIVENESS_TIMEOUT", "\"5s\""],
        ),
        (&[("ACCEL_RESTART", "x")], &["ACCEL_RESTART", "\"x\""]),
        (
            &[("ACCEL_MAX_RESTARTS", "-1")],
            &["ACCEL_MAX_RESTARTS", "\"-1\""],
        ),
    ];
    for (vars, parts) in cases {
        let error = job(vars).unwrap_err();
        assert!(error.is_topology(), "{vars:?}");
        for part in parts {
            assert!(error.to_string().contains(part), "{vars:?}: {error}");
        }
    }
    let error = launch(&[("LOCAL_RANK", "1")]).unwrap_err();
    assert!(error.to_string().contains("LOCAL_RANK is 1"), "{error}");
}

#[test]
fn an_address_of_ipv6_may_be_in_brackets() {
    let launch = launch(&[
        ("RANK", "1"),
        ("WORLD_SIZE", "2"),
        ("MASTER_ADDR", "[::1]"),
        ("MASTER_PORT", "7"),
    ]);
    let launch = launch.unwrap();
    let store = launch.rendezvous.unwrap();
    assert_eq!((store.host(), &*store.to_string()), ("::1", "[::1]:7"));
    assert!(store.is_loopback() && launch.topology.is_local_known());
    let agents = programs::of("PET_NNODES=2 PET_NODE_RANK=1 PET_MASTER_ADDR=[fd00::1]");
    let agents = AgentLaunch::from_vars(agents).unwrap().unwrap();
    assert_eq!(agents.head.unwrap().host, "fd00::1");
}

/// The variables of this project that belong to a launch.
const VARIABLES: [&str; 13] = [
    env::ELASTIC.name,
    env::FAULTS.name,
    env::INSECURE.name,
    env::JOB.name,
    env::LIVENESS_TIMEOUT.name,
    env::MAX_RESTARTS.name,
    env::NETWORK_INTERFACE.name,
    env::PORT.name,
    env::RESTART.name,
    env::SET_BY_LAUNCHER.name,
    env::STORE.name,
    env::TOKEN_FILE.name,
    env::TRANSPORT.name,
];
