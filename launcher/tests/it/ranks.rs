//! The environment and input that ranks get.

use std::io::Write;
use std::process::Stdio;

use crate::ports::free_port;
use crate::support::{Folder, Run};

#[test]
fn every_rank_knows_its_place() {
    let folder = Folder::new();
    folder.script(
        "show.sh",
        "echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $MASTER_ADDR $ACCEL_STORE\n\
         [ \"$MASTER_PORT\" = \"$ACCEL_PORT\" ] && [ \"$MASTER_PORT\" -gt 0 ] && echo $MASTER_PORT >> ports",
    );
    let ended = folder.launch("-n 3 show.sh").expect(0);
    let expected: Vec<String> = (0..3)
        .map(|rank| format!("[{rank}] {rank} 3 {rank} 3 127.0.0.1 launcher"))
        .collect();
    assert_eq!(ended.sorted(), expected);
    let ports = folder.read("ports");
    let mut ports: Vec<&str> = ports.lines().collect();
    assert_eq!(ports.len(), 3);
    ports.dedup();
    assert_eq!(ports.len(), 1, "all ranks meet at one port");
}

#[test]
fn the_launchers_own_rank_is_not_inherited() {
    let folder = Folder::new();
    folder.script(
        "show.sh",
        "echo $RANK $WORLD_SIZE ${TORCHELASTIC_RUN_ID-none}",
    );
    let variables = [
        ("RANK", "5"),
        ("WORLD_SIZE", "9"),
        ("TORCHELASTIC_RUN_ID", "x"),
    ];
    let ended = folder.launch_with("-n 1 show.sh", variables);
    assert_eq!(ended.expect(0).text(), "0 1 none\n");
}

#[test]
fn ranks_are_told_what_the_launcher_has_set_itself() {
    let folder = Folder::new();
    folder.script(
        "show.sh",
        "echo $ACCEL_SET_BY_LAUNCHER; env | grep ^ACCEL_ | cut -d= -f1 | sort | paste -sd,",
    );
    let line = "-n 1 --no-prefix --oversubscribe-gpus --network-interface lo show.sh";
    let ended = folder.launch_with(line, [("ACCEL_OVERLAP", "off")]);
    let text = ended.expect(0).text();
    let (listed, all) = text.trim().split_once('\n').unwrap();
    let mut listed: Vec<&str> = listed.split(',').collect();
    for option in ["ACCEL_NETWORK_INTERFACE", "ACCEL_OVERSUBSCRIBE_GPUS"] {
        assert!(listed.contains(&option), "{text}");
    }
    listed.extend(["ACCEL_OVERLAP", "ACCEL_SET_BY_LAUNCHER"]);
    listed.sort_unstable();
    assert_eq!(listed.join(","), all);
}

#[test]
fn ranks_are_told_what_the_launcher_was_called_with() {
    let folder = Folder::new();
    folder.script("show.sh", "echo \"$ACCEL_LAUNCH_COMMAND\"");
    let mut command = folder.command("-n 1 show.sh --password abc");
    command.arg("a b");
    let text = Run::start(command).end().expect(0).text();
    let words: Vec<String> = serde_json::from_str(text.trim()).unwrap();
    assert_eq!(
        words[1..],
        ["-n", "1", "show.sh", "--password", "***", "a b"]
    );
    assert!(words[0].ends_with("accel-launch"), "{text}");
    // A command line that is too long for a variable is left out and does no harm.
    let long = "x".repeat(100_000);
    let text = folder.ok(&format!("-n 1 show.sh {long}"));
    assert_eq!(text, "\n");
}

#[test]
fn restarts_have_the_identity_of_their_launch() {
    let folder = Folder::new();
    folder.script(
        "show.sh",
        "echo \"$ACCEL_LAUNCH_ID\"; [ \"$ACCEL_RESTART\" = 1 ]",
    );
    let launch = || {
        let ended = folder.launch("-n 1 --max-restarts 1 --restart-delay 0 show.sh");
        let text = ended.expect(0).text();
        let ids: Vec<_> = text.lines().map(str::to_owned).collect();
        assert_eq!(ids.len(), 2, "{text}");
        assert_eq!(ids[0], ids[1]);
        ids[0].clone()
    };
    assert_ne!(launch(), launch());
}

#[test]
fn variables_of_a_newer_launcher_are_ignored_and_not_inherited() {
    let folder = Folder::new();
    folder.script("show.sh", "echo ${ACCEL_FUTURE-none}");
    let run = |name: &str| {
        let listed = ("ACCEL_SET_BY_LAUNCHER", "ACCEL_JOB,ACCEL_FUTURE");
        folder.launch_with("-n 1 --no-prefix show.sh", [(name, "1"), listed])
    };
    assert_eq!(run("ACCEL_FUTURE").expect(0).text(), "none\n");
    run("ACCEL_FUTUER")
        .expect(2)
        .says("ACCEL_FUTUER is not known");
}

#[test]
fn a_launcher_in_a_job_of_another_one_has_a_job_of_its_own() {
    let folder = Folder::new();
    folder.script("inner.sh", "echo $ACCEL_JOB $ACCEL_TOKEN_FILE");
    folder.script(
        "outer.sh",
        "echo $ACCEL_JOB $ACCEL_TOKEN_FILE; $LAUNCHER -q -n 2 --no-prefix inner.sh",
    );
    // An empty value counts as unset.
    let variables = [
        ("LAUNCHER", env!("CARGO_BIN_EXE_accel-launch")),
        ("TMPDIR", ""),
    ];
    let ended = folder.launch_with("-n 2 --no-prefix outer.sh", variables);
    let text = ended.expect(0).text();
    let jobs: std::collections::BTreeSet<&str> = text.lines().collect();
    // There are two ranks of the outer job, and two of each of two inner jobs.
    assert_eq!((jobs.len(), text.lines().count()), (3, 6), "{text}");
    assert!(jobs.iter().all(|job| job.contains(" /tmp/")), "{text}");
}

#[test]
fn ranks_do_not_see_the_place_of_their_launcher() {
    let folder = Folder::new();
    folder.script(
        "show.sh",
        "env | grep -E '^(OMPI|PMI|PMIX|MPI|SLURM)_' | sort",
    );
    let variables = [
        ("OMPI_COMM_WORLD_RANK", "0"),
        ("OMPI_COMM_WORLD_SIZE", "1"),
        ("MPI_LOCALRANKID", "0"),
        ("MPI_LOCALNRANKS", "1"),
        ("PMI_RANK", "0"),
        ("PMI_SIZE", "1"),
        ("PMI_FD", "6"),
        ("PMIX_RANK", "0"),
        ("SLURM_PROCID", "0"),
        ("SLURM_LOCALID", "0"),
        ("SLURM_NODEID", "0"),
        ("SLURM_JOB_ID", "7"),
    ];
    let ended = folder.launch_with("-n 1 --no-prefix show.sh", variables);
    // A rank may ask Slurm about its job.
    assert_eq!(ended.text(), "SLURM_JOB_ID=7\n");
}

#[test]
fn a_launcher_that_another_one_started_several_times_is_refused() {
    let folder = Folder::new();
    folder.script("ran.sh", "echo ran >> ran");
    for (size, rank) in [
        ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
        ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    ] {
        folder
            .launch_with("-n 2 ran.sh", [(size, "2"), (rank, "1")])
            .expect(2)
            .says(size)
            .says("start it once a job");
    }
    assert_eq!(folder.read("ran"), "");
}

#[test]
fn a_port_can_be_chosen_and_a_taken_one_is_an_error() {
    let folder = Folder::new();
    folder.script("show.sh", "echo $MASTER_PORT >> ran");
    let port = free_port();
    let listener = std::net::TcpListener::bind(("127.0.0.1", port)).unwrap();
    let port = port.to_string();
    folder
        .launch(&format!("-n 2 --master-port {port} show.sh"))
        .expect(1)
        .says("is taken")
        .says(&port);
    assert_eq!(folder.read("ran"), "");
    drop(listener);
    folder
        .launch(&format!("-n 2 --master-port {port} show.sh"))
        .expect(0);
    assert_eq!(folder.read("ran"), format!("{port}\n{port}\n"));
}

#[test]
fn arguments_after_the_script_are_its_own() {
    let folder = Folder::new();
    folder.script(
        "show.sh",
        "for argument in \"$@\"; do echo \"<$argument>\"; done",
    );
    let arguments = [
        "--num-processes",
        "7",
        "-n",
        "--",
        "--log-dir=x",
        "two words",
        "",
        "--help",
    ];
    let mut command = folder.command("--num-processes 1 show.sh");
    command.args(arguments);
    let ended = Run::start(command).end().expect(0);
    let expected: String = arguments
        .iter()
        .map(|argument| format!("<{argument}>\n"))
        .collect();
    assert_eq!(ended.text(), expected);
    assert_eq!(folder.ok("-n 1 -- ./show.sh -n"), "<-n>\n");
}

#[test]
fn thread_counts_share_the_cores() {
    let folder = Folder::new();
    folder.script(
        "show.sh",
        "echo ${RAYON_NUM_THREADS-none} ${OMP_NUM_THREADS-none}",
    );
    let cores = std::thread::available_parallelism().unwrap().get();
    let share = (cores / 2).max(1);
    let ended = folder.launch_with("-n 2 show.sh", [("RAYON_NUM_THREADS", "11")]);
    let ended = ended.expect(0);
    assert_eq!(
        ended.sorted(),
        [format!("[0] 11 {share}"), format!("[1] 11 {share}")]
    );
}

#[test]
fn python_is_told_to_write_at_once_where_the_user_does_not_say_otherwise() {
    let folder = Folder::new();
    folder.script(
        "show.sh",
        "echo \"unbuffered: ${PYTHONUNBUFFERED-not set}\"",
    );
    let shown = |own: Option<&str>| {
        let variables = own.map(|value| ("PYTHONUNBUFFERED", value));
        folder
            .launch_with("-n 1 show.sh", variables)
            .expect(0)
            .text()
    };
    assert_eq!(shown(None), "unbuffered: 1\n");
    // Python then buffers, as it does by default.
    assert_eq!(shown(Some("")), "unbuffered: \n");
}

#[test]
fn rank_0_reads_standard_input() {
    let folder = Folder::new();
    folder.script("show.sh", "read line && echo got $line; exit 0");
    let mut command = folder.command("-n 2 show.sh");
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"hello\n").unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "[0] got hello\n");
}

#[test]
fn a_dry_run_starts_nothing() {
    let folder = Folder::new();
    folder.script("show.sh", "echo ran > ran");
    folder
        .launch("-n 2 --grace 0.5 --log-dir logs --dry-run show.sh --epochs 3")
        .expect(0)
        .shows("0 0 2 2")
        .shows("1 1 2 2")
        .shows("processes 2 --num-processes")
        .shows("grace 0.5 s --grace")
        .shows("store port a free one default")
        .shows("log folder logs --log-dir")
        .prints("show.sh --epochs 3");
    assert!(!folder.path().join("ran").exists());
    assert!(!folder.path().join("logs").exists());
}

#[test]
fn a_default_of_one_process_is_said_once() {
    let folder = Folder::new();
    folder.script("show.sh", "echo $WORLD_SIZE");
    let ended = folder
        .launch("show.sh")
        .expect(0)
        .says("starting 1 process; --num-processes N starts more");
    assert_eq!(ended.text(), "1\n");
    folder
        .launch("show.sh -n 2")
        .expect(0)
        .says("--num-processes N starts more, if it comes before the program; -n comes after it, and is passed to it");
    assert_eq!(folder.launch("--quiet show.sh").expect(0).stderr, "");
    assert_eq!(folder.launch("-n 1 show.sh").expect(0).stderr, "");
}
