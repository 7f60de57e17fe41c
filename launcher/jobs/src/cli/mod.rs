//! The command line: which command runs.

mod get;
#[cfg(feature = "image")]
mod image;
mod list;
#[cfg(feature = "ray")]
mod ray;
mod submit;
mod top;

use std::ffi::OsString;
use std::io;
use std::path::PathBuf;
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use clap::{Args, Parser, Subcommand};

use crate::engine::{Engine, LogsMode, LogsRequest, PortPair, connect};
use crate::error::{Error, Result};
use crate::job::{JobDetails, JobRecord, JobStatus, Records, Role};
use crate::output::print;
use crate::spec::{EngineAddress, EngineKind, JobName};
use submit::SubmitArgs;

/// Submits a training program to the engine of a site, and shows its jobs.
#[derive(Debug, Parser)]
#[command(name = "accel-jobs", version, disable_help_subcommand = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    place: Place,
}

/// Where engines and records are.
#[derive(Args, Clone, Debug)]
struct Place {
    /// The folder of the jobs' records [default: accel-jobs in XDG_STATE_HOME or ~/.local/state].
    #[arg(long, value_name = "DIR", global = true)]
    jobs_dir: Option<PathBuf>,
    #[command(flatten)]
    address: EngineAddress,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Submit a program; what follows `--` is the program and its arguments.
    Submit(Box<SubmitArgs>),
    /// List jobs, the newest first.
    List(list::ListArgs),
    /// Show a job: its status, its instances, and why it failed.
    Get(get::GetArgs),
    /// Print the output of a job: that of rank 0's node, which is that of all ranks.
    Logs(LogsArgs),
    /// Wait until a job has ended; the exit code is 0 where it succeeded, and 1 where it did not.
    Wait(WaitArgs),
    /// End a job, and remove all of it from its engine.
    #[command(visible_alias = "delete")]
    Stop(StopArgs),
    /// Make a port of a job one of this machine, TensorBoard's unless another is given, until Ctrl-C.
    PortForward(ForwardArgs),
    /// Show what nodes or jobs have of GPUs.
    #[command(subcommand)]
    Top(top::TopCommand),
    /// The volumes that jobs can mount.
    #[command(subcommand)]
    Data(top::DataCommand),
    /// Start and stop a Ray on this host.
    #[cfg(feature = "ray")]
    #[command(subcommand)]
    Ray(ray::RayCommand),
    /// Images of containers with a program in them.
    #[cfg(feature = "image")]
    #[command(subcommand)]
    Image(image::ImageCommand),
}

#[derive(Args, Debug)]
struct LogsArgs {
    /// The job.
    name: JobName,
    /// The instance, as `get` shows it [default: that of rank 0].
    #[arg(short, long, value_name = "INSTANCE")]
    instance: Option<String>,
    /// Go on until the job has ended, through its restarts.
    #[arg(short, long)]
    follow: bool,
    /// Only the last N lines.
    #[arg(short, long, value_name = "N", allow_negative_numbers = true)]
    tail: Option<usize>,
}

#[derive(Args, Debug)]
struct WaitArgs {
    /// The job.
    name: JobName,
    /// Give up after so long: `90m`, `2h`.
    #[arg(long, value_name = "TIME", value_parser = crate::spec::time_limit)]
    timeout: Option<Duration>,
}

#[derive(Args, Debug)]
struct ForwardArgs {
    /// The job.
    name: JobName,
    /// The port of this machine, and that of node 0 or of TensorBoard.
    #[arg(value_name = "LOCAL:REMOTE", default_value = "9090:6006", value_parser = ports)]
    ports: PortPair,
}

#[derive(Args, Debug)]
struct StopArgs {
    /// The jobs.
    #[arg(required = true)]
    names: Vec<JobName>,
    /// Remove their records as well, so that their names are free.
    #[arg(long)]
    forget: bool,
}

/// Runs the command of this command line.
///
/// # Errors
/// Those of the command.
pub(crate) fn run(line: impl IntoIterator<Item = OsString>) -> Result<ExitCode> {
    let cli = match Cli::try_parse_from(in_our_words(line)) {
        Ok(cli) => cli,
        Err(error) => {
            // A closed pipe is no error.
            let _ = error.print();
            return Ok(ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2)));
        }
    };
    let place = &cli.place;
    match &cli.command {
        Command::Submit(arguments) => submit::run(arguments, place),
        Command::List(arguments) => list::run(arguments, place),
        Command::Get(arguments) => get::run(arguments, place),
        Command::Logs(arguments) => logs(arguments, place),
        Command::Wait(arguments) => wait(arguments, place),
        Command::Stop(arguments) => stop(arguments, place),
        Command::PortForward(arguments) => forward(arguments, place),
        Command::Top(command) => top::run(command, place),
        Command::Data(command) => top::data(command, place),
        #[cfg(feature = "ray")]
        Command::Ray(command) => ray::run(command, place),
        #[cfg(feature = "image")]
        Command::Image(command) => image::run(command),
    }
}

/// Arena's `submit pytorch …` as `submit --engine kubernetes --kind pytorchjob …`.
fn in_our_words(line: impl IntoIterator<Item = OsString>) -> Vec<OsString> {
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

impl Place {
    fn records(&self) -> Result<Records> {
        Records::open(self.jobs_dir.clone())
    }

    fn connect(&self, kind: EngineKind) -> Result<Box<dyn Engine>> {
        connect(kind, &self.address)
    }

    /// A job and its engine.
    fn job(&self, name: &JobName) -> Result<(Records, JobRecord, Box<dyn Engine>)> {
        let records = self.records()?;
        let record = records.read(name)?;
        check_submitted(&record)?;
        let address = self.address.or(&record.spec.address);
        let engine = connect(record.spec.engine, &address)?;
        Ok((records, record, engine))
    }
}

/// Refuses to ask an engine for a job by its name alone, which may be another's.
fn check_submitted(record: &JobRecord) -> Result<()> {
    if !record.is_half_submitted() {
        return Ok(());
    }
    let name = &record.spec.name;
    Err(Error::not_found(format!(
        "the submission of job {name} was interrupted, and whether {} has it is not known: look for it there; \
         `accel-launch jobs stop {name} --forget` frees the name here",
        record.spec.engine
    )))
}

/// What is known of a job now; where its engine has forgotten it, what was known before.
fn details(records: &Records, record: &mut JobRecord, engine: &dyn Engine) -> Result<JobDetails> {
    let folder = records.job_folder(&record.spec.name);
    let details = match engine.get(record, &folder) {
        Err(error) if error.is_not_found() => {
            // Whoever has stopped the job meanwhile has written how it ended.
            *record = records.read(&record.spec.name)?;
            let Some(mut last) = record.last.clone() else {
                return Err(error);
            };
            if !last.status.is_final() {
                last.status = JobStatus::Unknown;
                last.reason = Some(error.to_string());
            }
            last
        }
        found => found?,
    };
    if record.last.as_ref() != Some(&details) {
        record.last = Some(details.clone());
        records.write(record)?;
    }
    Ok(details)
}

fn logs(arguments: &LogsArgs, place: &Place) -> Result<ExitCode> {
    let (records, record, engine) = place.job(&arguments.name)?;
    let request = LogsRequest {
        node: node(&record, arguments.instance.as_deref())?,
        mode: if arguments.follow {
            LogsMode::Follow
        } else {
            LogsMode::Once
        },
        tail: arguments.tail,
    };
    let folder = records.job_folder(&arguments.name);
    match engine.logs(&record, &folder, &request, &mut io::stdout().lock()) {
        Err(error) if !error.is_broken_pipe() => Err(error),
        _ => Ok(ExitCode::SUCCESS),
    }
}

/// The node whose instance has this name; node 0 where none is named.
fn node(record: &JobRecord, instance: Option<&str>) -> Result<usize> {
    let Some(wanted) = instance else {
        return Ok(0);
    };
    let job = record.spec.name.as_str();
    let nodes = 0..record.spec.nodes.get();
    let names: Vec<_> = nodes.map(|node| Role::instance_name(job, node)).collect();
    names.iter().position(|name| name == wanted).ok_or_else(|| {
        Error::usage(format!(
            "job {job} has no instance {wanted:?}; it has {}",
            names.join(", ")
        ))
    })
}

fn forward(arguments: &ForwardArgs, place: &Place) -> Result<ExitCode> {
    let (records, record, engine) = place.job(&arguments.name)?;
    let folder = records.job_folder(&arguments.name);
    engine.forward(&record, &folder, arguments.ports, &mut io::stdout().lock())?;
    Ok(ExitCode::SUCCESS)
}

fn ports(text: &str) -> std::result::Result<PortPair, String> {
    let pair = || {
        let (local, remote) = text.split_once(':')?;
        Some(PortPair {
            local: local.parse().ok()?,
            remote: remote.parse().ok()?,
        })
    };
    pair().ok_or_else(|| "expected LOCAL:REMOTE, such as 9090:6006".to_owned())
}

fn wait(arguments: &WaitArgs, place: &Place) -> Result<ExitCode> {
    let (records, mut record, engine) = place.job(&arguments.name)?;
    let deadline = arguments.timeout.map(|limit| Instant::now() + limit);
    loop {
        match details(&records, &mut record, engine.as_ref()) {
            Ok(details) if details.status == JobStatus::Succeeded => return Ok(ExitCode::SUCCESS),
            Ok(details) if details.status.is_final() => {
                return Err(Error::refused(format!(
                    "job {} has ended as {}; `accel-launch jobs get {0}` says why",
                    arguments.name, details.status
                )));
            }
            Ok(details) if details.status == JobStatus::Unknown => {
                let reason = details.reason.unwrap_or_default();
                return Err(Error::not_found(format!(
                    "the end of job {} is not known: {reason}",
                    arguments.name
                )));
            }
            Ok(_) => {}
            // The engine may answer again.
            Err(error) if error.is_unreachable() && deadline.is_some() => {}
            Err(error) => return Err(error),
        }
        if deadline.is_some_and(|deadline| Instant::now() > deadline) {
            return Err(Error::unreachable(format!(
                "job {} has not ended in time",
                arguments.name
            )));
        }
        thread::sleep(engine.poll());
    }
}

fn stop(arguments: &StopArgs, place: &Place) -> Result<ExitCode> {
    for name in &arguments.names {
        let known = place.records()?;
        if arguments.forget && known.read(name)?.is_half_submitted() {
            // Another's job may have its name, so nothing is removed from the engine.
            known.remove(name)?;
            print(&format!("job {name} forgotten\n"))?;
            continue;
        }
        let (records, mut record, engine) = place.job(name)?;
        let before = details(&records, &mut record, engine.as_ref());
        engine.stop(&record, &records.job_folder(name))?;
        if arguments.forget {
            records.remove(name)?;
        } else if let Ok(mut last) = before
            && !last.status.is_final()
        {
            last.status = JobStatus::Stopped;
            last.ended = Some(crate::output::now());
            record.last = Some(last);
            records.write(&record)?;
        }
        print(&format!("job {name} stopped\n"))?;
    }
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arenas_words_are_ours() {
        let words = |line: &[&str]| -> Vec<String> {
            in_our_words(line.iter().map(OsString::from))
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
