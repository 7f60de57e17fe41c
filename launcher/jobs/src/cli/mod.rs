//! The command line: which command runs.

mod control;
#[cfg(feature = "image")]
mod image;
mod show;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use accelerator_host::cli::{BUILD_OPTIONS, Error, Result, chain};
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Args, Parser, Subcommand};

use crate::engine::{Engine, connect};
use crate::job::{JobDetails, JobRecord, JobStatus, Records};
use crate::output::warn;
use crate::spec::{EngineAddress, EngineKind, JobName};

/// Submits a training program to Slurm, Kubernetes, Ray or this machine, and shows its jobs.
#[derive(Debug, Parser)]
#[command(
    name = "accel-jobs",
    bin_name = "accel-launch jobs",
    version,
    disable_help_subcommand = true
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    location: JobsLocation,
}

/// The location of engines and records.
#[derive(Args, Clone, Debug)]
struct JobsLocation {
    /// The folder for the records of jobs [default: accel-jobs in XDG_STATE_HOME or ~/.local/state].
    #[arg(long, value_name = "DIR", global = true)]
    jobs_dir: Option<PathBuf>,
    #[command(flatten)]
    address: EngineAddress,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Submit a program; the words after `--` are the program and its arguments.
    #[command(
        override_usage = "accel-launch submit --name NAME [--engine ENGINE] [OPTIONS] -- PROGRAM [ARGS]..."
    )]
    Submit(Box<control::SubmitArgs>),
    /// List jobs, newest first.
    List(show::ListArgs),
    /// Show a job: its status, its instances, and why it failed.
    Get(show::GetArgs),
    /// Print the output of all ranks of a job, which the node of rank 0 collects.
    Logs(control::LogsArgs),
    /// Wait until a job has ended; the exit code is 0 if it succeeded, else 1.
    Wait(control::WaitArgs),
    /// End a job, and remove everything of it from its engine.
    #[command(visible_alias = "delete")]
    Stop(control::StopArgs),
    /// Show the allocated and total GPUs of nodes, or the GPUs of jobs.
    #[command(subcommand)]
    Top(show::TopCommand),
    /// List the volumes that jobs can mount.
    #[command(subcommand)]
    Data(show::DataCommand),
    /// Make a container image of a program.
    #[cfg(feature = "image")]
    #[command(subcommand)]
    Image(image::ImageCommand),
}

/// Runs the command of a command line.
///
/// # Errors
/// Returns the error of the command.
pub(crate) fn run(line: impl IntoIterator<Item = OsString>) -> Result<ExitCode> {
    let cli = match Cli::try_parse_from(translate_arena(line)) {
        Ok(cli) => cli,
        Err(error) => {
            // A closed pipe is not an error.
            let _ = error.print();
            if let Some(ContextValue::String(option)) = error.get(ContextKind::InvalidArg)
                && error.kind() == ErrorKind::UnknownArgument
                && BUILD_OPTIONS.contains(&option.as_str())
            {
                warn(
                    "a job starts a program that is built already: build it by cargo, and give its path, such as target/release/train",
                );
            }
            return Ok(ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2)));
        }
    };
    let location = &cli.location;
    match &cli.command {
        Command::Submit(arguments) => control::submit(arguments, location),
        Command::List(arguments) => show::list(arguments, location),
        Command::Get(arguments) => show::get(arguments, location),
        Command::Logs(arguments) => control::logs(arguments, location),
        Command::Wait(arguments) => control::wait(arguments, location),
        Command::Stop(arguments) => control::stop(arguments, location),
        Command::Top(command) => show::top(command, location),
        Command::Data(command) => show::data(command, location),
        #[cfg(feature = "image")]
        Command::Image(command) => image::run(command),
    }
}

/// Translates Arena's `submit pytorch …` to `submit --engine kubernetes --kind pytorchjob …`.
fn translate_arena(line: impl IntoIterator<Item = OsString>) -> Vec<OsString> {
    let mut words: Vec<OsString> = line.into_iter().collect();
    let submit = words.iter().position(|word| word == "submit");
    if let Some(at) = submit.map(|submit| submit + 1)
        && words
            .get(at)
            .is_some_and(|word| word == "pytorch" || word == "pytorchjob")
    {
        let ours = ["--engine", "kubernetes", "--kind", "pytorchjob"];
        words.splice(at..=at, ours.map(OsString::from));
    }
    words
}

impl JobsLocation {
    fn records(&self) -> Result<Records> {
        Records::open(self.jobs_dir.clone())
    }

    fn connect(&self, kind: EngineKind) -> Result<Box<dyn Engine>> {
        connect(kind, &self.address)
    }

    /// Reads the record of a job and connects to its engine.
    fn job(&self, name: &JobName) -> Result<(Records, JobRecord, Box<dyn Engine>)> {
        let records = self.records()?;
        let record = records.read(name)?;
        check_submitted(&record)?;
        let engine = self.engine_of(&record)?;
        Ok((records, record, engine))
    }

    /// Connects to the engine of a job.
    fn engine_of(&self, record: &JobRecord) -> Result<Box<dyn Engine>> {
        connect(record.spec.engine, &self.address.or(&record.spec.address))
    }
}

/// Refuses to ask an engine for a job whose submission it has not answered.
fn check_submitted(record: &JobRecord) -> Result<()> {
    if !record.is_half_submitted() {
        return Ok(());
    }
    let name = &record.spec.name;
    let frees = match record.spec.engine.keeps_nonce() {
        true => "ends it, and frees the name",
        false => "frees the name here",
    };
    Err(Error::not_found(format!(
        "the submission of job {name} was interrupted, and whether {0} has it is not known: look for a job {name} there{1}; \
         `accel-launch jobs stop {name} --forget` {frees}",
        record.spec.engine,
        record.spec.engine.how_to_look(name),
    )))
}

/// Returns the state of a job now or, if its engine has forgotten it, its last known state.
fn details(records: &Records, record: &mut JobRecord, engine: &dyn Engine) -> Result<JobDetails> {
    if let Some(ended) = record.ended() {
        return Ok(ended.clone());
    }
    let folder = records.job_folder(&record.spec.name);
    let answer = match engine.get(record, &folder) {
        Err(error) if !error.is_not_found() => return Err(error),
        answer => answer,
    };
    let tell = |record: &mut JobRecord| match &answer {
        Ok(details) => record.last = Some(details.clone()),
        Err(error) => {
            if let Some(last) = &mut record.last {
                last.status = JobStatus::Unknown;
                last.reason = Some(error.to_string());
            }
        }
    };
    // If another command has stopped the job meanwhile, the end that it recorded stays.
    match records.update(record, tell) {
        Ok(updated) => *record = updated,
        Err(error) if error.is_not_found() => return Err(error),
        // The answer counts even if it cannot be recorded.
        Err(error) => {
            warn(&chain(&error));
            tell(record);
        }
    }
    match record.last.clone() {
        Some(last) => Ok(last),
        None => answer,
    }
}

#[cfg(test)]
#[path = "../../../../tests/src/documents.rs"]
mod documents;

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn documented_command_lines_are_understood() {
        let repository = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."));
        let mut found = 0;
        for words in documents::commands(repository, "accel-launch") {
            let skipped = match words.get(1).map(String::as_str) {
                Some("submit") => 1,
                Some("jobs") => 2,
                _ => continue,
            };
            if !cfg!(feature = "image") && words.iter().any(|word| word == "image") {
                continue;
            }
            found += 1;
            let line =
                std::iter::once("accel-jobs").chain(words.iter().skip(skipped).map(String::as_str));
            let read = Cli::try_parse_from(translate_arena(line.map(OsString::from)));
            assert!(read.is_ok(), "{words:?}: {}", read.unwrap_err());
        }
        assert!(found > 20, "found {found}");
    }

    #[test]
    fn arenas_words_are_translated() {
        let words = |line: &[&str]| -> Vec<String> {
            translate_arena(line.iter().map(OsString::from))
                .into_iter()
                .map(|word| word.into_string().unwrap())
                .collect()
        };
        assert_eq!(
            words(&["accel-jobs", "submit", "pytorch", "--name=a", "x"]),
            [
                "accel-jobs",
                "submit",
                "--engine",
                "kubernetes",
                "--kind",
                "pytorchjob",
                "--name=a",
                "x"
            ]
        );
        let other = ["accel-jobs", "submit", "--name", "a", "pytorch"];
        assert_eq!(words(&other), other);
    }
}
