//! Command lines that are refused, and command lines that change nothing.

use std::process::Command;

use crate::support::{JOBS, Jobs, launcher};

#[test]
fn what_is_wrong_is_named() {
    let jobs = Jobs::new();
    for (line, text) in [
        ("submit -- true", "--name"),
        ("submit --name A_b -- true", "lower-case letters"),
        ("submit --name a --nodes 0 -- true", "--nodes"),
        (
            "submit --name a --nproc-per-node none -- true",
            "auto, gpu or cpu",
        ),
        ("submit --name a --memory much -- true", "16Gi"),
        ("submit --name a --time soon -- true", "90m"),
        ("submit --name a --env 1A=b -- true", "NAME=VALUE"),
        ("submit --name a --engine pbs -- true", "local"),
        (
            "submit --name a --env NOT_SET_ANYWHERE -- true",
            "NOT_SET_ANYWHERE has no value here",
        ),
        ("submit --name a", "PROGRAM"),
        (
            "submit --name a --bin train",
            "a job starts a program that is built already",
        ),
        ("submit --name a --nodes 65537 -- true", "1 to 65536"),
        (
            "submit --name a --env ACCEL_TOKEN_FILE=/a -- true",
            "a token of its own",
        ),
        (
            "submit --name a -- /etc/passwd",
            "is not a program of this machine",
        ),
        (
            "submit --name a -- ./no-such",
            "\"./no-such\" is not a program of this machine",
        ),
        (
            "submit --name a --working-dir /no-such -- true",
            "--working-dir /no-such is no folder",
        ),
        ("logs a -t -1", "--tail"),
        (
            "submit --name a -n 2 --nodes 2 -- true",
            "give --nproc-per-node, the number of ranks on each node",
        ),
        (
            "submit --name a -n 2 --nproc-per-node 2 -- true",
            "cannot be used with",
        ),
        // Without them the job would be another one.
        (
            "submit --name a --gpus 2 -- true",
            "the engine local does not have --gpus, and the job would be another one without",
        ),
    ] {
        jobs.refused(line, 2, text);
    }
    jobs.refused("get a", 1, "there is no job");
    assert_eq!(
        jobs.ok("list").trim_end(),
        "NAME  STATUS  TRAINER  AGE  NODE"
    );
}

#[test]
fn a_dry_run_shows_the_agents_and_leaves_nothing() {
    launcher();
    let jobs = Jobs::new();
    let line = "submit --name a --workers 2 --nproc-per-node 3 --dry-run -- /bin/true --x";
    let words: Vec<_> = line.split(' ').chain(["y z"]).collect();
    let shown = jobs.run_by(&mut Command::new(JOBS), &words).ok();
    let lines: Vec<_> = shown.lines().collect();
    assert_eq!(lines.len(), 2, "{shown}");
    assert!(lines[1].ends_with("--nnodes 2 --node-rank 1 --rdzv-endpoint 127.0.0.1:PORT --nproc-per-node 3 -- /bin/true --x 'y z'"), "{shown}");
    assert_eq!(std::fs::read_dir(jobs.folder()).unwrap().count(), 0);
}

#[test]
fn processes_are_those_of_the_launcher() {
    launcher();
    let jobs = Jobs::new();
    for option in ["-n 2", "--num-processes 2", "--nproc-per-node 2"] {
        let line = format!("submit --name a {option} --dry-run -- /bin/true");
        jobs.shows(&line, "--nproc-per-node 2 --log-dir");
    }
}

#[test]
fn usage_is_that_of_the_launcher() {
    let jobs = Jobs::new();
    for (line, usage) in [
        ("submit --help", "Usage: accel-launch submit --name NAME"),
        ("list --help", "Usage: accel-launch jobs list"),
        ("--help", "Usage: accel-launch jobs "),
    ] {
        jobs.shows(line, usage);
    }
    let line = "submit --name a --no-such -- true";
    jobs.refused(line, 2, "Usage: accel-launch submit --name NAME");
}

#[cfg(all(feature = "kubernetes", feature = "ray", feature = "slurm"))]
#[test]
fn options_of_another_engine_that_say_what_runs_where_are_refused() {
    let jobs = Jobs::new();
    for (engine, option) in [
        ("slurm", "--image x"),
        ("slurm", "--node-selector gpu-type=h100"),
        ("local", "--data a:/b"),
        ("kubernetes", "--constraint a100"),
        ("kubernetes", "--sbatch-arg=--gres=gpu:2"),
        ("ray", "--sync-mode git --sync-source x"),
        ("local", "--placement spread"),
    ] {
        let name = option.split([' ', '=']).next().unwrap();
        let line = format!("submit --name a --engine {engine} {option} --dry-run -- true");
        let text = format!("the engine {engine} does not have {name}");
        jobs.refused(&line, 2, &text);
    }
}

#[cfg(feature = "kubernetes")]
#[test]
fn a_dry_run_for_kubernetes_needs_no_cluster() {
    let jobs = Jobs::new();
    let line = "submit --name a --engine kubernetes --image x --nodes 2 --dry-run -- /app/train";
    let home = jobs.folder().to_str().unwrap();
    let none = [("HOME", home), ("KUBECONFIG", "/no-such")];
    let printed = jobs.run_with(line, &none);
    assert_eq!(printed.code, Some(0), "{printed:?}");
    assert!(printed.stdout.contains("kind: Job"), "{printed:?}");
    let warning = "these objects are for Kubernetes 1.33";
    assert!(printed.stderr.contains(warning), "{printed:?}");
    // A context that is given has to exist.
    let line = line.replace("--dry-run", "--dry-run --context there");
    assert_eq!(jobs.run_with(&line, &none).code, Some(2));
}

#[cfg(feature = "slurm")]
#[test]
fn a_dry_run_for_slurm_needs_no_sbatch() {
    launcher();
    let jobs = Jobs::new();
    let line = "submit --name a --engine slurm --dry-run -- /bin/true";
    let printed = jobs.run_with(line, &[("PATH", "/no-such")]);
    assert!(printed.ok().contains("sbatch --parsable --job-name=a"));
}

#[test]
fn a_command_line_in_one_word_is_the_shells() {
    launcher();
    let jobs = Jobs::new();
    let words = [
        "submit",
        "--name",
        "a",
        "--dry-run",
        "python train.py --epochs 3",
    ];
    let shown = jobs.run_by(&mut Command::new(JOBS), &words).ok();
    assert!(
        shown
            .trim_end()
            .ends_with("sh -c 'python train.py --epochs 3'"),
        "{shown}"
    );
}

#[cfg(feature = "slurm")]
#[test]
fn a_job_whose_submission_was_interrupted_is_not_stopped_by_its_name() {
    let jobs = Jobs::new();
    launcher();
    jobs.ok("submit --name a -- true");
    jobs.ok("wait a");
    let path = jobs.folder().join("a/job.json");
    let mut record = jobs.json("a", "job.json");
    record["id"] = "".into();
    record["spec"]["engine"] = "slurm".into();
    std::fs::write(&path, record.to_string()).unwrap();
    for command in ["get", "logs", "stop"] {
        jobs.refused(
            &format!("{command} a"),
            1,
            "was interrupted, and whether slurm has it is not known",
        );
    }
    assert_eq!(jobs.ok("stop --forget a"), "job a forgotten\n");
}

#[test]
fn a_record_that_cannot_be_read_is_a_warning() {
    let jobs = Jobs::new();
    std::fs::create_dir(jobs.folder().join("a")).unwrap();
    std::fs::write(jobs.folder().join("a/job.json"), "{}").unwrap();
    let printed = jobs.run("list");
    assert_eq!(printed.code, Some(0));
    assert!(
        printed.stderr.contains("warning: ") && printed.stderr.contains("no record of a job"),
        "{printed:?}"
    );
}
