//! Places of agents, read from the variables of engines.

use std::fmt;

use super::{programs::of, *};

/// Formats a launch as `1/2 x 4 at head:1 by engine`, with `?` for what an engine does not tell.
fn shown(text: &str) -> String {
    let launch = AgentLaunch::from_vars(of(text)).unwrap_or_else(|error| panic!("{text}: {error}"));
    let Some(launch) = launch else {
        return "nothing".to_owned();
    };
    fn or<T: fmt::Display>(value: Option<T>) -> String {
        value.map_or("?".to_owned(), |value| value.to_string())
    }
    format!(
        "{}/{} x {} at {} by {}",
        or(launch.node),
        or(launch.nodes),
        or(launch.processes),
        or(launch.head),
        launch.source.launcher
    )
}

#[test]
fn engines_tell_agents_their_place() {
    let slurm = "SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_STEP_NODELIST=n[1-2] SLURM_STEP_NUM_TASKS=2 \
                 SLURM_STEP_TASKS_PER_NODE=1(x2) SLURM_PROCID=1 SLURM_LOCALID=0 SLURM_NODEID=1";
    let master = "MASTER_ADDR=m MASTER_PORT=23456";
    for (text, expected) in [
        (
            &*format!(
                "RANK=1 WORLD_SIZE=8 PET_NNODES=2 PET_NPROC_PER_NODE=4 PET_NODE_RANK=1 {master}"
            ),
            "1/2 x 4 at m:23456 by torchrun's settings",
        ),
        (
            &format!(
                "RANK=1 WORLD_SIZE=2 PET_NNODES=2 PET_NPROC_PER_NODE=auto PET_NODE_RANK=1 {master}"
            ),
            "1/2 x auto at m:23456 by torchrun's settings",
        ),
        (
            &format!("RANK=1 WORLD_SIZE=2 NPROC_PER_NODE=8 {master}"),
            "1/2 x 8 at m:23456 by PyTorchJob",
        ),
        (
            "PET_NNODES=2 PET_NODE_RANK=1 PET_NPROC_PER_NODE=auto PET_MASTER_ADDR=h PET_MASTER_PORT=29500",
            "1/2 x auto at h:29500 by torchrun's settings",
        ),
        (
            "PET_NNODES=1:4 PET_RDZV_BACKEND=c10d PET_RDZV_ENDPOINT=j-worker-0:23456 PET_MAX_RESTARTS=3",
            "?/1:4 x ? at j-worker-0:23456 by torchrun's settings",
        ),
        ("PET_STANDALONE=", "nothing"),
        ("JOB_COMPLETION_INDEX=1", "1/? x ? at ? by an Indexed Job"),
        (slurm, "1/2 x ? at n1:21007 by Slurm"),
        (
            "SM_HOSTS=[\"algo-1\",\"algo-2\"] SM_CURRENT_HOST=algo-2 SM_NUM_GPUS=8",
            "1/2 x 8 at algo-1 by SageMaker",
        ),
        (
            "SM_HOSTS=[\"algo-1\"] SM_CURRENT_HOST=algo-1 SM_NUM_GPUS=0",
            "0/1 x auto at algo-1 by SageMaker",
        ),
        // The first is the body of a batch script, and the second a rank of another launcher.
        ("SLURM_JOB_ID=7 SLURM_PROCID=0 SLURM_NTASKS=4", "nothing"),
        ("PET_NNODES=2 RANK=1 WORLD_SIZE=2 LOCAL_RANK=0", "nothing"),
        (
            "SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=1 SLURM_PROCID=0",
            "0/1 x ? at 127.0.0.1:21007 by Slurm",
        ),
    ] {
        assert_eq!(shown(text), expected, "{text}");
    }
}

#[test]
fn what_engines_tell_wrong_is_an_error() {
    for (text, part) in [
        (
            "SLURM_STEP_ID=0 SLURM_STEP_NODELIST=n[1-2] SLURM_STEP_NUM_TASKS=4 \
             SLURM_STEP_TASKS_PER_NODE=2(x2) SLURM_PROCID=1 SLURM_LOCALID=1 SLURM_NODEID=0",
            "--ntasks-per-node=1",
        ),
        ("PET_NNODES=2:1", "PET_NNODES: \"2:1\""),
        ("PET_NNODES=2 PET_NODE_RANK=2", "host 2 of 2"),
        ("PET_NPROC_PER_NODE=cpu", "PET_NPROC_PER_NODE: \"cpu\""),
        (
            "PET_NNODES=2 PET_RDZV_ENDPOINT=h:0",
            "PET_RDZV_ENDPOINT: \"h:0\"",
        ),
        ("RANK=1", "WORLD_SIZE is not"),
        ("SM_HOSTS=algo-1 SM_CURRENT_HOST=algo-1", "SM_HOSTS is"),
        (
            "SM_HOSTS=[\"a\"] SM_CURRENT_HOST=b",
            "SM_CURRENT_HOST is \"b\"",
        ),
        ("SM_HOSTS=[\"a\"]", "SM_CURRENT_HOST is not"),
        ("JOB_COMPLETION_INDEX=x", "JOB_COMPLETION_INDEX is \"x\""),
    ] {
        let error = AgentLaunch::from_vars(of(text)).unwrap_err();
        assert!(error.is_topology(), "{text}: {error}");
        assert!(error.to_string().contains(part), "{text}: {error}");
    }
}

#[test]
fn engines_that_did_not_tell_are_noticed() {
    let text = "PET_NNODES=2 JOB_COMPLETION_INDEX=1 RANK=1 WORLD_SIZE=2";
    let launch = AgentLaunch::from_vars(of(text)).unwrap().unwrap();
    let noticed: Vec<_> = launch
        .noticed
        .iter()
        .map(|source| source.variable)
        .collect();
    assert_eq!(noticed, ["RANK", "JOB_COMPLETION_INDEX"]);
    assert_eq!(
        launch.source.to_string(),
        "torchrun's settings (PET_NNODES)"
    );
}

#[test]
fn an_engine_that_gave_no_place_before_another_one_is_noticed() {
    // A job's shell, which is no task of a step.
    let text = "SLURM_JOB_ID=7 JOB_COMPLETION_INDEX=1";
    let launch = AgentLaunch::from_vars(of(text)).unwrap().unwrap();
    assert_eq!(launch.source.variable, "JOB_COMPLETION_INDEX");
    let noticed = launch.noticed.iter().map(|source| source.variable);
    assert_eq!(noticed.collect::<Vec<_>>(), ["SLURM_JOB_ID"]);
}

#[test]
fn addresses_are_read_and_shown() {
    for (text, host, port) in [
        ("h", "h", None),
        (" h:29400 ", "h", Some(29_400)),
        ("[::1]:7", "::1", Some(7)),
        ("[::1]", "::1", None),
        ("fd00::1", "fd00::1", None),
    ] {
        let head: AgentHead = text.parse().unwrap();
        assert_eq!((&*head.host, head.port), (host, port), "{text}");
        assert_eq!(head.to_string().parse::<AgentHead>().unwrap(), head);
    }
    for text in ["", ":7", "h:", "h:x", "h:70000", "[::1", "[::1]7"] {
        assert!(text.parse::<AgentHead>().is_err(), "{text:?}");
    }
}
