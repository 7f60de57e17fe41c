//! Places of programs, read from Slurm's variables.

use super::programs::{AT, address, noticed, refuses, step, tells};

#[test]
fn tasks_of_slurms_steps_are_told_their_place() {
    for (hosts, tasks, per_node, place, expected, head) in [
        ("tux[1-2]", 4, "2(x2)", [3, 1, 1], "3/4 1/2", "tux1"),
        ("n[1-4]", 7, "2(x3),1", [6, 0, 3], "6/7 0/1", "n1"),
        ("n[1-2]", 4, "2(x2)", [1, 0, 1], "1/4 0/2", "n1"),
        ("n[3-4]", 2, "1(x2)", [1, 0, 1], "1/2 0/1", "n3"),
    ] {
        let job = "SLURM_JOB_NODELIST=n[1-8] SLURM_NTASKS=64";
        let text = format!("{} {job}", step(hosts, tasks, per_node, place));
        let launch = tells(&text, &format!("{expected} Slurm"));
        assert_eq!(address(&launch), format!("{head}:21007"));
        let store = launch.rendezvous.as_ref().unwrap();
        assert_eq!((&*store.job, store.is_in_network()), ("slurm-7.0", true));
    }
    let one_host = step("n1", 2, "2", [1, 1, 0]);
    assert_eq!(
        address(&tells(&one_host, "1/2 1/2 Slurm")),
        "127.0.0.1:21007"
    );
    let other = format!("{one_host} SLURM_STEP_ID=3");
    let other = other.replacen("SLURM_STEP_ID=0", "X=0", 1);
    assert_eq!(address(&tells(&other, "1/2 1/2 Slurm")), "127.0.0.1:21778");
    let told = format!("{one_host} MASTER_PORT=4000");
    assert_eq!(address(&tells(&told, "1/2 1/2 Slurm")), "127.0.0.1:4000");
    let told = format!("{one_host} MASTER_ADDR=x ACCEL_PORT=4000 ACCEL_JOB=mine");
    let launch = tells(&told, "1/2 1/2 Slurm");
    assert_eq!(address(&launch), "x:4000");
    assert_eq!(launch.rendezvous.unwrap().job, "mine");
    // PMIx serves Slurm, which gives the place.
    tells(
        &format!("{one_host} PMIX_NAMESPACE=slurm.7.0 PMIX_RANK=1"),
        "1/2 1/2 Slurm",
    );
}

#[test]
fn steps_that_contradict_themselves_are_errors() {
    refuses(
        &step("n[1-2]", 5, "2(x2)", [0, 0, 0]),
        &["SLURM_STEP_NUM_TASKS is 5", "counts 4"],
    );
    refuses(
        &step("n[1-3]", 4, "2(x2)", [0, 0, 0]),
        &["SLURM_STEP_NODELIST has 3 hosts"],
    );
    refuses(
        &step("n[1-2", 4, "2(x2)", [0, 0, 0]),
        &["SLURM_STEP_NODELIST is", "no `]`"],
    );
    refuses(
        &step("n[1-2]", 4, "2(x", [0, 0, 0]),
        &["SLURM_STEP_TASKS_PER_NODE is"],
    );
    refuses(
        &step("n[1-2]", 4, "2(x2)", [4, 0, 0]),
        &["SLURM_PROCID is 4"],
    );
    refuses(
        &step("n[1-2]", 4, "2(x2)", [3, 2, 1]),
        &["SLURM_LOCALID is 2"],
    );
    refuses(
        &step("n[1-2]", 4, "2(x2)", [3, 1, 2]),
        &["SLURM_NODEID is 2"],
    );
    refuses(
        &step("n[1-2]", 4, "2(x2)", [0, 0, 1]),
        &["SLURM_NODEID is 1", "rank 0"],
    );
    refuses(
        "SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2",
        &["SLURM_PROCID=1", "SLURM_LOCALID is not"],
    );
    let by_list = format!(
        "{} SLURM_DISTRIBUTION=arbitrary",
        step("n[1-2]", 2, "1(x2)", [0, 0, 1])
    );
    refuses(
        &by_list,
        &["SLURM_DISTRIBUTION=arbitrary", "--mpi=pmi2", "MASTER_ADDR"],
    );
    tells(&format!("{by_list} {AT}"), "0/2 0/1 Slurm");
}

#[test]
fn a_job_of_slurms_without_a_step_has_no_place() {
    let body = "SLURM_JOB_ID=7 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_NTASKS=4";
    let parts = [
        "SLURM_JOB_ID=7",
        "SLURM_NTASKS=4",
        "srun",
        "RANK=0 and WORLD_SIZE=1",
    ];
    for more in [
        "",
        "SLURM_STEP_ID=-5",
        "SLURM_STEP_ID=4294967290 SLURM_STEP_NUM_TASKS=1",
    ] {
        refuses(&format!("{body} {more}"), &parts);
        tells(
            &format!("{body} {more} RANK=0 WORLD_SIZE=1"),
            "0/1 0/1 RANK and WORLD_SIZE",
        );
    }
    refuses("SLURM_JOB_ID=7 SLURM_NNODES=2", &["SLURM_NNODES=2"]);
    let one = "SLURM_JOB_ID=7 SLURM_NNODES=1 SLURM_NTASKS=1 SLURM_PROCID=0";
    assert_eq!(noticed(&tells(one, "0/1 0/1 nobody")), ["SLURM_PROCID"]);
    let shell = "SLURM_JOB_ID=7 SLURM_STEP_ID=3 SLURM_STEP_NUM_TASKS=1 SLURM_NTASKS=4 SLURM_PROCID=0 \
                 SLURM_LOCALID=0 SLURM_NODEID=0";
    tells(shell, "0/1 0/1 Slurm");
}
