//! Slurm's own commands, and the meaning of their errors.

use std::io::{self, ErrorKind, Read, Write};
use std::process::{Command, Output, Stdio};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::error::{Error, Result};

/// The time limit of a command: longer than Slurm's own commands wait for a controller that does not answer.
const COMMAND_LIMIT: Duration = Duration::from_secs(150);
/// The interval at which a command is polled.
const LOOK: Duration = Duration::from_millis(5);

/// Parts of Slurm's messages, the kind of error of each, and the remedy.
const ERRORS: [(&str, ErrorClass, &str); 19] = [
    (
        "Invalid job id",
        ErrorClass::NotFound,
        "Slurm has forgotten it",
    ),
    (
        "invalid partition",
        ErrorClass::Refused,
        "`sinfo -s` shows the partitions; give one by --partition",
    ),
    (
        "Invalid qos",
        ErrorClass::Refused,
        "--priority names a QOS; `sacctmgr show qos` lists them",
    ),
    (
        "Invalid account",
        ErrorClass::Refused,
        "`sacctmgr show assoc user=$USER` shows your accounts and partitions; give them by --account and --partition",
    ),
    (
        "Invalid feature",
        ErrorClass::Refused,
        "`sinfo -o '%n %f'` shows the features of nodes; --constraint names them",
    ),
    (
        "Invalid generic resource",
        ErrorClass::Refused,
        "no node has such GPUs; `accel-launch jobs top nodes --engine slurm` shows what there is",
    ),
    (
        "node configuration is not available",
        ErrorClass::Refused,
        "no node has so much; ask for fewer --nodes, --cpus or --gpus or less --memory; \
         `sinfo --Node --format '%N %c %m %G'` shows what there is",
    ),
    (
        "More processors requested than permitted",
        ErrorClass::Refused,
        "ask for fewer --cpus",
    ),
    (
        "Node count specification invalid",
        ErrorClass::Refused,
        "the partition has no so many nodes; ask for fewer --nodes",
    ),
    (
        "time limit is invalid",
        ErrorClass::Refused,
        "`sinfo -s` shows the limits of partitions; give a shorter --time",
    ),
    (
        "violates accounting/QOS policy",
        ErrorClass::Refused,
        "a quota of yours is used up, or the job is larger than a quota; `sacctmgr show assoc user=$USER` shows them",
    ),
    (
        "not permitted",
        ErrorClass::Refused,
        "you have no right to it; ask for another --partition, --account or --priority",
    ),
    (
        "permission denied",
        ErrorClass::Refused,
        "you have no right to it; the job may be another user's",
    ),
    (
        "Unable to contact slurm controller",
        ErrorClass::Unreachable,
        "`scontrol ping` shows whether its controller is up; try again",
    ),
    (
        "timed out",
        ErrorClass::Unreachable,
        "its controller is busy; try again",
    ),
    (
        "Zero Bytes were transmitted",
        ErrorClass::Unreachable,
        "its controller was interrupted; try again",
    ),
    (
        "temporarily",
        ErrorClass::Unreachable,
        "its controller is busy; try again",
    ),
    (
        "configuration",
        ErrorClass::Unreachable,
        "this machine is no client of Slurm; log in to one, or set SLURM_CONF",
    ),
    (
        "munge",
        ErrorClass::Unreachable,
        "this machine cannot prove to Slurm who you are; is munged running?",
    ),
];

#[derive(Clone, Copy)]
enum ErrorClass {
    NotFound,
    Refused,
    Unreachable,
}

/// Runs `program` and returns its standard output, with times as seconds since 1970.
///
/// # Errors
/// When it cannot be run or fails; the message has Slurm's words and the remedy. [`Error::is_not_found`] if Slurm knows no
/// such job.
pub(super) fn slurm(program: &str, arguments: &[&str]) -> Result<String> {
    said(program, Command::new(program).args(arguments), "")
}

/// Gives `script` to sbatch with these options, and returns what it prints.
///
/// # Errors
/// As for [`slurm`].
pub(super) fn sbatch(options: &[String], script: &str) -> Result<String> {
    said("sbatch", Command::new("sbatch").args(options), script)
}

fn said(program: &str, command: &mut Command, input: &str) -> Result<String> {
    let output = output(command, input, COMMAND_LIMIT).map_err(|error| match error.kind() {
        ErrorKind::TimedOut => Error::unreachable(format!(
            "{program} has not ended after {} s: `scontrol ping` shows whether Slurm's controller is up; try again",
            COMMAND_LIMIT.as_secs()
        )),
        _ => Error::system(format!("{program} cannot be run")).with_source(error),
    })?;
    let errors = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        return Err(refusal(program, &errors));
    }
    if program == "sbatch" {
        // Messages of the site; standard error may be closed.
        let _ = io::stderr().write_all(&output.stderr);
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Runs a command until its end, or for `limit`.
fn output(command: &mut Command, input: &str, limit: Duration) -> io::Result<Output> {
    command
        .env("SLURM_TIME_FORMAT", "%s")
        // Queries go to the cluster to which the job was submitted, which is that of the login node.
        .env_remove("SLURM_CLUSTERS")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn()?;
    let deadline = Instant::now() + limit;
    let (stdin, input) = (child.stdin.take(), input.to_owned());
    in_thread(move || {
        // A command that does not read it reports the reason.
        let _ = stdin.map(|mut stdin| stdin.write_all(input.as_bytes()));
    })?;
    let stdout = child.stdout.take();
    let stdout = in_thread(move || all_of(stdout))?;
    let stderr = child.stderr.take();
    let stderr = in_thread(move || all_of(stderr))?;
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if Instant::now() > deadline {
            child.kill()?;
            child.wait()?;
            return Err(ErrorKind::TimedOut.into());
        }
        thread::sleep(LOOK);
    };
    Ok(Output {
        status,
        stdout: stdout.join().unwrap_or_default(),
        stderr: stderr.join().unwrap_or_default(),
    })
}

fn in_thread<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    thread::Builder::new().spawn(work)
}

fn all_of(pipe: Option<impl Read>) -> Vec<u8> {
    let mut all = Vec::new();
    // After an error, the bytes read before it are the output.
    let _ = pipe.map(|mut pipe| pipe.read_to_end(&mut all));
    all
}

/// Makes an error of what a command of Slurm printed.
fn refusal(program: &str, errors: &str) -> Error {
    let lines: Vec<&str> = errors
        .lines()
        .map(|line| {
            let line = line.strip_prefix(program).unwrap_or(line);
            let line = line.trim_start_matches([':', ' ']);
            ["error: ", "fatal: "]
                .iter()
                .find_map(|word| line.strip_prefix(word))
                .unwrap_or(line)
        })
        .filter(|line| !line.is_empty())
        .collect();
    let words = match &lines[..] {
        [] => format!("{program} failed and did not say why"),
        lines => format!("Slurm says: {}", lines.join("; ")),
    };
    let lower = words.to_lowercase();
    let known = ERRORS
        .iter()
        .find(|(part, _, _)| lower.contains(&part.to_lowercase()));
    match known {
        Some((_, ErrorClass::NotFound, advice)) => Error::not_found(format!("{words}: {advice}")),
        Some((_, ErrorClass::Refused, advice)) => Error::refused(format!("{words}: {advice}")),
        Some((_, ErrorClass::Unreachable, advice)) => {
            Error::unreachable(format!("{words}: {advice}"))
        }
        None => Error::refused(words),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_say_what_to_do() {
        let said = |text: &str| refusal("sbatch", text).to_string();
        assert_eq!(
            said(
                "sbatch: error: invalid partition specified: nope\n\
                 sbatch: error: Batch job submission failed: Invalid partition name specified\n"
            ),
            "Slurm says: invalid partition specified: nope; Batch job submission failed: Invalid partition name \
             specified: `sinfo -s` shows the partitions; give one by --partition"
        );
        assert!(
            said("sbatch: error: Batch job submission failed: Requested node configuration is not available")
                .contains("no node has so much")
        );
        assert!(
            said("sbatch: error: Batch job submission failed: Job violates accounting/QOS policy (job submit limit)")
                .contains("quota")
        );
        assert_eq!(
            said("sbatch: error: something new"),
            "Slurm says: something new"
        );
        assert_eq!(said(""), "sbatch failed and did not say why");
    }

    #[test]
    fn a_command_that_does_not_end_is_ended() {
        let run = |words: &[&str], limit: Duration| {
            let input = "x".repeat(1 << 20);
            output(Command::new(words[0]).args(&words[1..]), &input, limit)
        };
        let slow = run(&["sleep", "600"], Duration::from_millis(50));
        assert_eq!(slow.unwrap_err().kind(), ErrorKind::TimedOut);
        let echoed = run(&["cat"], COMMAND_LIMIT).unwrap();
        assert_eq!(
            (echoed.status.success(), echoed.stdout.len()),
            (true, 1 << 20)
        );
    }

    #[test]
    fn what_may_succeed_later_is_told_from_what_will_not() {
        let error = refusal(
            "scontrol",
            "slurm_load_jobs error: Invalid job id specified\n",
        );
        assert!(error.is_not_found());
        for text in [
            "slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
            "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation",
            "sinfo: fatal: Could not establish a configuration source",
        ] {
            assert!(refusal("sbatch", text).is_unreachable(), "{text}");
        }
    }
}
