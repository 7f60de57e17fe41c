//! Ranks that meet at the launcher's store. The test program acts as the ranks.

use std::path::Path;
use std::process::Command;

use crate::ports::free_port;
use crate::support::{DEADLINE, Ended, Folder, Run, join_group, test_as_program};
use accelerator_collective::internal::Token;
use accelerator_collective::{GroupOptions, Launch, ProcessGroup, ReduceOp};
use accelerator_manifest::internal::StagedFolder;

/// The variable with the name of the file to which each rank adds its sum.
const RANK_OUTPUT: &str = "LAUNCHER_TEST_OUTPUT";

fn is_rank() -> bool {
    std::env::var_os(RANK_OUTPUT).is_some()
}

/// Works as a rank: adds up all ranks' numbers and writes the sum to a file of its own.
fn work() -> accelerator_collective::Result<()> {
    let group = join_group()?;
    let mut values = [1.0_f64, group.rank() as f64];
    group.all_reduce(&mut values, ReduceOp::Sum)?;
    if let Some(path) = std::env::var_os(RANK_OUTPUT) {
        let path = std::path::Path::new(&path).with_extension(group.rank().to_string());
        std::fs::write(path, format!("{values:?}")).ok();
    }
    group.close()
}

/// Launches this test program as ranks that run only the test `name` of this module.
fn launch(folder: &Folder, name: &str, options: &str, variables: &[(&str, &str)]) -> Ended {
    let program = test_as_program(&format!("store::{name}"));
    let mut command = folder.command(&format!("{options} {program}"));
    command
        .env(RANK_OUTPUT, folder.path().join("sum"))
        .envs(variables.iter().copied());
    Run::start(command).end()
}

#[test]
fn a_single_rank_needs_no_store() -> accelerator_collective::Result<()> {
    if is_rank() {
        return work();
    }
    let folder = Folder::new();
    launch(&folder, "a_single_rank_needs_no_store", "-n 1", &[]).expect(0);
    assert_eq!(folder.read("sum.0"), "[1.0, 0.0]");
    Ok(())
}

#[test]
fn a_token_is_asked_for_and_proved() -> accelerator_collective::Result<()> {
    if is_rank() {
        return work();
    }
    let folder = Folder::new();
    let path = folder.path().join("token");
    Token::generate()?.write_file(&path)?;
    let variables = [("ACCEL_TOKEN_FILE", path.to_str().unwrap_or_default())];
    let name = "a_token_is_asked_for_and_proved";
    launch(&folder, name, "-n 2", &variables).expect(0);
    assert_eq!(folder.read("sum.1"), "[2.0, 1.0]");

    let short = folder.write("short", "too short");
    let variables = [("ACCEL_TOKEN_FILE", short.to_str().unwrap_or_default())];
    launch(&folder, name, "-n 2", &variables)
        .expect(2)
        .says("token file");
    Ok(())
}

/// Returns the launcher of `folder`, whose descriptor 3 is the file of a token or a pipe from it.
fn with_descriptor(folder: &Folder, token: &Path, redirection: &str, path: &str) -> Command {
    let mut command = folder.launcher_by("sh", &["-c", redirection]);
    command.env("TOKEN", token).env("ACCEL_TOKEN_FILE", path);
    command
}

const BY_PIPE: &str = "cat \"$TOKEN\" | \"$0\" \"$@\" 3<&0 </dev/null";
const BY_FILE: &str = "exec \"$0\" \"$@\" 3<\"$TOKEN\"";

#[test]
fn a_token_may_come_by_a_descriptor() -> accelerator_collective::Result<()> {
    if is_rank() {
        return work();
    }
    let folder = Folder::new();
    let token = folder.path().join("token");
    Token::generate()?.write_file(&token)?;
    let secret = folder.read("token");
    // Each attempt of the job reads the token.
    folder.script(
        "show.sh",
        "cat $ACCEL_TOKEN_FILE >> $RANK.shown; echo >> $RANK.shown; [ $ACCEL_RESTART = 1 ]",
    );
    let program = test_as_program("store::a_token_may_come_by_a_descriptor");
    for (redirection, path) in [
        (BY_PIPE, "/dev/fd/3"),
        (BY_PIPE, "/proc/self/fd/3"),
        (BY_FILE, "/dev/fd/3"),
    ] {
        let mut command = with_descriptor(&folder, &token, redirection, path);
        command
            .args(format!("-n 2 {program}").split(' '))
            .env(RANK_OUTPUT, folder.path().join("sum"));
        Run::start(command).end().expect(0);
        assert_eq!(folder.read("sum.1"), "[2.0, 1.0]");
        std::fs::remove_file(folder.path().join("sum.1")).unwrap();

        let mut command = with_descriptor(&folder, &token, redirection, path);
        command.args("-n 2 --max-restarts 1 --restart-delay 0 show.sh".split(' '));
        Run::start(command).end().expect(0);
        for rank in ["0.shown", "1.shown"] {
            let shown = folder.read(rank);
            let shown: Vec<_> = shown.split_whitespace().collect();
            assert_eq!(shown, [secret.trim(); 2], "{path}");
            std::fs::remove_file(folder.path().join(rank)).unwrap();
        }
    }
    Ok(())
}

#[test]
fn launchers_of_several_hosts_may_read_the_token_from_a_pipe() -> accelerator_collective::Result<()>
{
    let folder = Folder::new();
    let token = folder.path().join("token");
    Token::generate()?.write_file(&token)?;
    folder.script("show.sh", "cat $ACCEL_TOKEN_FILE");
    let endpoint = format!("127.0.0.1:{}", free_port());
    let runs = ["0", "1"].map(|host| {
        let mut command = with_descriptor(&folder, &token, BY_PIPE, "/dev/fd/3");
        command
            .args(format!("--nnodes 2 --node-rank {host} --rdzv-endpoint {endpoint}").split(' '))
            .args(["--no-prefix", "show.sh"]);
        Run::start(command)
    });
    let [head, other] = runs.map(Run::end);
    let secret = folder.read("token").trim().to_owned();
    assert_eq!(head.expect(0).sorted(), [secret.clone(), secret]);
    other.expect(0);
    Ok(())
}

#[test]
fn a_local_job_has_a_token_of_its_own() -> accelerator_collective::Result<()> {
    const TOKEN: &str = "ACCEL_TOKEN_FILE";
    if is_rank() {
        let launch = Launch::from_vars(|name| match name {
            TOKEN => None,
            _ => std::env::var(name).ok(),
        })?;
        let options = GroupOptions::new().with_connect_timeout(DEADLINE / 2);
        let error = ProcessGroup::connect(&launch, &options).unwrap_err();
        assert!(error.is_unauthorized(), "{error}");
        return work();
    }
    let folder = Folder::new();
    let name = "a_local_job_has_a_token_of_its_own";
    let temporary = folder.path().join("temporary");
    std::fs::create_dir(&temporary).unwrap();
    // A launcher that was killed leaves this folder.
    let staged = format!("accel-token-{}", rustix::process::getuid().as_raw());
    let staged = StagedFolder::create(&temporary, &staged, |_| false).unwrap();
    let left = staged.path().to_owned();
    drop(staged);
    std::fs::create_dir(&left).unwrap();
    let variables = [("TMPDIR", temporary.to_str().unwrap_or_default())];
    launch(&folder, name, "-n 2", &variables).expect(0);
    assert_eq!(folder.read("sum.1"), "[2.0, 1.0]");
    let left = temporary.read_dir().unwrap().count();
    assert_eq!(left, 0, "tokens go with their jobs");
    // A process that may not join a job with a token may join one that waives it.
    folder.script("show.sh", "echo ${ACCEL_TOKEN_FILE:-none}");
    let shown = |ranks: usize, insecure: &str| {
        let line = format!("-n {ranks} --no-prefix show.sh");
        let ended = folder.launch_with(&line, [("ACCEL_INSECURE", insecure)]);
        ended.expect(0).sorted()
    };
    assert_eq!(shown(2, "1"), ["none", "none"]);
    assert_eq!(shown(1, "0"), ["none"], "there is nobody to meet");
    let told = shown(2, "0");
    assert!(told[0] == told[1] && told[0] != "none", "{told:?}");
    Ok(())
}

#[test]
fn a_rank_of_another_job_is_refused() -> accelerator_collective::Result<()> {
    if is_rank() {
        let launch = Launch::from_vars(|name| match name {
            "ACCEL_JOB" => Some("another".to_owned()),
            _ => std::env::var(name).ok(),
        })?;
        let options = GroupOptions::new().with_connect_timeout(DEADLINE / 2);
        return ProcessGroup::connect(&launch, &options).map(|_| ());
    }
    let folder = Folder::new();
    let name = "a_rank_of_another_job_is_refused";
    let ended = launch(&folder, name, "-n 2 --log-dir logs", &[]);
    assert_ne!(ended.code(), 0);
    let log = folder.read("logs/latest/rank-0.log");
    assert!(log.contains("another"), "{log}");
    Ok(())
}
