//! Slurm's own commands, and the meaning of their errors.

use std::fs::File;
use std::io::{self, Seek, Write};
use std::process::{Command, Stdio};
use std::time::Duration;

use accelerator_host::cli::{Error, Result};
use accelerator_host::process::{self, Group, Limits, Outcome, Output};
use rustix::fs::{MemfdFlags, memfd_create};

/// The limits of a command. Its time is longer than Slurm's own commands wait for a controller that does not answer.
/// Ctrl-C ends a submission.
const LIMITS: Limits = Limits {
    time: Duration::from_secs(150),
    output: 256 << 20,
    group: Group::Callers,
};

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
    let output = run(Command::new(program).args(arguments), Stdio::null())?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Gives `script` to sbatch with these options, and returns its output.
///
/// # Errors
/// As for [`slurm`].
pub(super) fn sbatch(options: &[String], script: &str) -> Result<String> {
    let input = || -> io::Result<File> {
        let mut file = File::from(memfd_create("sbatch", MemfdFlags::CLOEXEC)?);
        file.write_all(script.as_bytes())?;
        file.rewind()?;
        Ok(file)
    };
    let input = input().map_err(|error| {
        Error::system("the system gives no memory for the script of sbatch").with_source(error)
    })?;
    let output = run(Command::new("sbatch").args(options), input)?;
    // Messages of the site; standard error may be closed.
    let _ = io::stderr().write_all(&output.stderr);
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

fn run(command: &mut Command, stdin: impl Into<Stdio>) -> Result<Output> {
    let program = command.get_program().to_string_lossy().into_owned();
    command
        .env("SLURM_TIME_FORMAT", "%s")
        // Queries go to the cluster to which the job was submitted, which is that of the login node.
        .env_remove("SLURM_CLUSTERS");
    let output = process::run_with(command, stdin, LIMITS)
        .map_err(|error| Error::system(format!("{program} cannot be run")).with_source(error))?;
    match output.outcome {
        Outcome::Ended(status) if status.success() => Ok(output),
        Outcome::Ended(_) => Err(refusal(&program, &String::from_utf8_lossy(&output.stderr))),
        Outcome::OutOfTime => Err(Error::unreachable(format!(
            "{program} has not ended after {} s: `scontrol ping` shows whether Slurm's controller is up; try again",
            LIMITS.time.as_secs()
        ))),
        Outcome::OutputTooLong => Err(Error::system(format!(
            "{program} prints more than {} MiB; is it Slurm's own?",
            LIMITS.output >> 20
        ))),
    }
}

/// Makes an error of the standard error of a command of Slurm.
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
