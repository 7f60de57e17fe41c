//! `accel-jobs submit`, `logs`, `wait` and `stop`: a job from its submission to its end.

use std::collections::BTreeMap;
use std::io;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use accelerator_host::cli::{Error, Result, chain};
use clap::Args;

use super::{JobsLocation, details};
use crate::engine::local::may_run;
use crate::engine::{LogsMode, LogsRequest, new_nonce, render};
use crate::job::{JobDetails, JobRecord, JobStatus, Role};
use crate::output::{now, print, warn};
use crate::spec::{EngineKind, EngineOptions, JobName, JobSpec, Memory, Resources, time_limit};

/// The options of a job. Arena's words are aliases.
#[derive(Args, Clone, Debug)]
pub(super) struct SubmitArgs {
    /// The engine that runs the job.
    #[arg(long, value_enum, default_value_t = EngineKind::Local)]
    engine: EngineKind,

    /// The job's name; no other job may have it.
    #[arg(long, value_name = "NAME")]
    name: JobName,

    /// Number of nodes, including the node of rank 0.
    #[arg(long, value_name = "N", default_value_t = NonZeroUsize::MIN, alias = "workers", alias = "nnodes", value_parser = nodes)]
    nodes: NonZeroUsize,

    /// Number of processes (ranks) of a job on one node, as for `accel-launch -n`; with several nodes, give
    /// --nproc-per-node.
    #[arg(short = 'n', long, value_name = "N", conflicts_with = "nproc_per_node")]
    num_processes: Option<NonZeroUsize>,

    /// Number of ranks on each node: N, or `auto`, `gpu` or `cpu` as for `accel-launch` [default: one per GPU, else 1].
    #[arg(long, value_name = "N|auto|gpu|cpu", value_parser = nproc)]
    nproc_per_node: Option<String>,

    /// Number of cores of each node.
    #[arg(long, value_name = "N", alias = "cpu")]
    cpus: Option<NonZeroUsize>,

    /// Number of GPUs of each node.
    #[arg(long, value_name = "N", default_value_t = 0)]
    gpus: usize,

    /// Memory of each node, such as 16Gi or 512M.
    #[arg(long, value_name = "SIZE")]
    memory: Option<Memory>,

    /// The time limit of the job, such as 90m, 2h or 1-12:00:00.
    #[arg(long, value_name = "TIME", value_parser = time_limit, alias = "running-timeout")]
    time: Option<Duration>,

    /// An environment variable for the ranks; can be repeated. NAME alone passes the value from this environment, and
    /// keeps it out of process lists.
    #[arg(short, long, value_name = "NAME[=VALUE]", value_parser = variable)]
    env: Vec<(String, String)>,

    /// The folder in which the program starts.
    #[arg(long, value_name = "DIR")]
    working_dir: Option<PathBuf>,

    /// If the job fails or loses a node, start it again, up to N times; it continues from its last checkpoint.
    #[arg(long, value_name = "N", default_value_t = 0)]
    max_restarts: u32,

    /// A priority class of Kubernetes, or a QOS of Slurm.
    #[arg(long, value_name = "NAME")]
    priority: Option<String>,

    /// Run a TensorBoard on --logdir. It runs as long as the job; on Kubernetes, until the job is stopped.
    #[arg(long)]
    tensorboard: bool,

    /// The folder to which the program writes event files, by the path that the program sees.
    #[arg(long, value_name = "DIR", default_value = "/training_logs")]
    logdir: PathBuf,

    /// Print what would be sent to the engine, without secrets and values that are generated at submission, and send
    /// nothing.
    #[arg(long)]
    dry_run: bool,

    #[command(flatten)]
    options: EngineOptions,

    /// The program and its arguments. A single word that contains blanks is a shell command.
    #[arg(value_name = "PROGRAM", required = true, trailing_var_arg = true)]
    program: Vec<String>,
}

/// The most nodes of a job, more than any launcher supports.
const MOST_NODES: usize = 65_536;

pub(super) fn submit(arguments: &SubmitArgs, location: &JobsLocation) -> Result<ExitCode> {
    let spec = arguments.spec(location)?;
    let (decisive, ignored) = spec.ignored_options();
    if !decisive.is_empty() {
        return Err(Error::usage(format!(
            "the engine {} does not have {}, and the job would be another one without: leave it out, or choose the engine \
             that has it by --engine",
            spec.engine,
            decisive.join(", ")
        )));
    }
    if !ignored.is_empty() {
        warn(&format!(
            "the engine {} ignores {}",
            spec.engine,
            ignored.join(", ")
        ));
    }
    if arguments.dry_run {
        return print(&render(&spec, &location.address)?);
    }
    let engine = location.connect(spec.engine)?;
    let records = location.records()?;
    let mut record = JobRecord {
        spec,
        id: String::new(),
        submitted: now(),
        last: None,
        removed: false,
    };
    let folder = records.create(&record)?;
    let spec = &record.spec;
    let submitted = engine.submit(spec, &folder).inspect_err(|_| {
        // The error of the submission is the one to return.
        let _ = records.remove(&record);
    })?;
    // Without a record, the job could not be stopped by its name.
    let kept = records.update(&record, |record| record.id.clone_from(&submitted.id));
    if let Err(error) = kept {
        record.id = submitted.id;
        let _ = engine.stop(&record, &folder);
        let _ = records.remove(&record);
        return Err(error);
    }
    let mut text = String::new();
    for line in submitted.created {
        text.push_str(&format!("{line}\n"));
    }
    text.push_str(&format!("The job {0} has been submitted\nYou can run `accel-launch jobs get {0}` to check its status\n", record.spec.name));
    print(&text)
}

impl SubmitArgs {
    fn spec(&self, location: &JobsLocation) -> Result<JobSpec> {
        let program = match &self.program[..] {
            [command] if command.contains(char::is_whitespace) => {
                vec!["sh".to_owned(), "-c".to_owned(), command.clone()]
            }
            words => words.to_vec(),
        };
        if self.num_processes.is_some() && self.nodes.get() > 1 {
            return Err(Error::usage(format!(
                "--num-processes is a total elsewhere, and with --nodes {} it could be meant for all nodes or for each: give \
                 --nproc-per-node, the number of ranks on each node",
                self.nodes
            )));
        }
        let here = self.num_processes.map(|count| count.to_string());
        let one_a_gpu = || self.gpus.max(1).to_string();
        Ok(JobSpec {
            name: self.name.clone(),
            nonce: new_nonce()?,
            engine: self.engine,
            nodes: self.nodes,
            nproc_per_node: self
                .nproc_per_node
                .clone()
                .or(here)
                .unwrap_or_else(one_a_gpu),
            resources: Resources {
                cpus: self.cpus,
                gpus: self.gpus,
                memory: self.memory,
            },
            time_limit: self.time,
            env: self.env.iter().cloned().collect::<BTreeMap<_, _>>(),
            working_dir: self.working_dir.clone(),
            max_restarts: self.max_restarts,
            priority: self.priority.clone(),
            tensorboard: self.tensorboard,
            logdir: self.logdir.clone(),
            program,
            address: location.address.of(self.engine),
            options: self.options.clone(),
        })
    }
}

fn nodes(text: &str) -> std::result::Result<NonZeroUsize, String> {
    let count = text
        .parse()
        .ok()
        .filter(|count: &NonZeroUsize| count.get() <= MOST_NODES);
    count.ok_or_else(|| format!("expected a number from 1 to {MOST_NODES}"))
}

fn nproc(text: &str) -> std::result::Result<String, String> {
    let is_count = text.parse::<usize>().is_ok_and(|count| count > 0);
    match is_count || ["auto", "gpu", "cpu"].contains(&text) {
        true => Ok(text.to_owned()),
        false => Err("expected a number of at least 1, auto, gpu or cpu".to_owned()),
    }
}

fn variable(text: &str) -> std::result::Result<(String, String), String> {
    let is_name = |name: &str| {
        let fits = |c: char| c.is_ascii_alphanumeric() || c == '_';
        !name.is_empty()
            && !name.starts_with(|c: char| c.is_ascii_digit())
            && name.chars().all(fits)
    };
    match text.split_once('=') {
        _ if text.split('=').next() == Some(accelerator_host::TOKEN_FILE.name) => {
            Err("the job has a token of its own".to_owned())
        }
        Some((name, value)) if is_name(name) => Ok((name.to_owned(), value.to_owned())),
        None if is_name(text) => match std::env::var(text) {
            Ok(value) => Ok((text.to_owned(), value)),
            Err(_) => Err(format!(
                "{text} has no value here; give NAME=VALUE, or set it"
            )),
        },
        _ => Err("expected NAME=VALUE, with a name of letters, digits and '_'".to_owned()),
    }
}

#[derive(Args, Debug)]
pub(super) struct LogsArgs {
    /// The job.
    name: JobName,
    /// The instance, as `get` shows it [default: that of rank 0].
    #[arg(short, long, value_name = "INSTANCE")]
    instance: Option<String>,
    /// Keep printing until the job has ended, through restarts.
    #[arg(short, long)]
    follow: bool,
    /// Print only the last N lines.
    #[arg(short, long, value_name = "N", allow_negative_numbers = true)]
    tail: Option<usize>,
}

/// Prints the output of a job.
pub(super) fn logs(arguments: &LogsArgs, location: &JobsLocation) -> Result<ExitCode> {
    let (records, mut record, engine) = location.job(&arguments.name)?;
    let request = LogsRequest {
        node: node(&record, arguments.instance.as_deref())?,
        mode: if arguments.follow {
            LogsMode::Follow
        } else {
            LogsMode::Once
        },
        tail: arguments.tail,
    };
    if let Ok(details) = details(&records, &mut record, engine.as_ref())
        && details.status == JobStatus::Pending
    {
        let reason = details.reason.map(|reason| format!(" ({reason})"));
        warn(&format!(
            "job {} waits{}: it has no output yet",
            arguments.name,
            reason.unwrap_or_default()
        ));
    }
    let folder = records.job_folder(&arguments.name);
    match engine.logs(&record, &folder, &request, &mut io::stdout().lock()) {
        Err(error) if !error.is_broken_pipe() => Err(error),
        _ => Ok(ExitCode::SUCCESS),
    }
}

/// Returns the node whose instance has this name; node 0 if none is named.
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

#[derive(Args, Debug)]
pub(super) struct WaitArgs {
    /// The job.
    name: JobName,
    /// Give up after this time: `90m`, `2h`.
    #[arg(long, value_name = "TIME", value_parser = time_limit)]
    timeout: Option<Duration>,
}

/// The time for which an engine may fail to answer if there is no --timeout.
const LONGEST_SILENCE: Duration = Duration::from_secs(300);

/// Waits until a job has ended.
pub(super) fn wait(arguments: &WaitArgs, location: &JobsLocation) -> Result<ExitCode> {
    let (records, mut record, engine) = location.job(&arguments.name)?;
    let deadline = arguments.timeout.map(|limit| Instant::now() + limit);
    let mut silent_since = None;
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
            Ok(_) => silent_since = None,
            // The engine may answer again.
            Err(error) if error.is_unreachable() => {
                let since = *silent_since.get_or_insert_with(|| {
                    warn(&format!("{}; retrying", chain(&error)));
                    Instant::now()
                });
                if deadline.is_none() && since.elapsed() > LONGEST_SILENCE {
                    return Err(error);
                }
            }
            Err(error) => return Err(error),
        }
        if deadline.is_some_and(|deadline| Instant::now() > deadline) {
            return Err(Error::unreachable(format!(
                "job {} has not ended in time",
                arguments.name
            )));
        }
        engine.pause(&record);
    }
}

#[derive(Args, Debug)]
pub(super) struct StopArgs {
    /// The jobs.
    #[arg(required = true)]
    names: Vec<JobName>,
    /// Also remove the jobs' records, which frees their names.
    #[arg(long)]
    forget: bool,
}

/// Ends jobs, and removes them from their engines.
pub(super) fn stop(arguments: &StopArgs, location: &JobsLocation) -> Result<ExitCode> {
    let mut done = Ok(ExitCode::SUCCESS);
    for name in &arguments.names {
        let stopped = match arguments.forget {
            true => forget(name, location),
            false => stop_job(name, location),
        };
        match stopped {
            Ok(what) => {
                print(&format!("job {name} {what}\n"))?;
            }
            // The others are stopped nevertheless; the command returns the last error.
            Err(error) => {
                if let Err(before) = std::mem::replace(&mut done, Err(error)) {
                    warn(&chain(&before));
                }
            }
        }
    }
    done
}

/// Ends a job, and records that.
fn stop_job(name: &JobName, location: &JobsLocation) -> Result<String> {
    let record = location.records()?.read(name)?;
    if let Some(ended) = record.ended().filter(|_| record.is_over()) {
        return Ok(had_ended(ended));
    }
    let (records, mut record, engine) = location.job(name)?;
    let before = details(&records, &mut record, engine.as_ref());
    engine.stop(&record, &records.job_folder(name))?;
    let stopped = records.update(&record, |record| {
        record.removed = true;
        if let Some(last) = &mut record.last {
            last.stop(now());
        }
    });
    match stopped {
        // Another command has forgotten it meanwhile.
        Err(error) if !error.is_not_found() => return Err(error),
        _ => {}
    }
    Ok(match before {
        Ok(before) if before.status.is_final() => had_ended(&before),
        Ok(before) if before.status == JobStatus::Unknown => {
            format!("is gone: {}", before.reason.unwrap_or_default())
        }
        Err(error) if error.is_not_found() => format!("is gone: {}", chain(&error)),
        _ => "stopped".to_owned(),
    })
}

fn had_ended(details: &JobDetails) -> String {
    format!(
        "had ended as {} before; nothing of it is left",
        details.status
    )
}

/// Ends a job, and removes its record. A job whose submission was interrupted is ended only if the engine keeps its nonce:
/// otherwise another user's job may have its name.
fn forget(name: &JobName, location: &JobsLocation) -> Result<String> {
    let records = location.records()?;
    let folder = records.job_folder(name);
    match records.read(name) {
        Ok(record) if record.is_half_submitted() && !record.spec.engine.keeps_nonce() => {
            records.remove(&record)?;
            Ok("forgotten".to_owned())
        }
        Ok(record) => {
            if !record.is_over() {
                location.engine_of(&record)?.stop(&record, &folder)?;
            }
            records.remove(&record)?;
            Ok("stopped".to_owned())
        }
        Err(error) if !folder.is_dir() || may_run(&folder) => Err(error),
        Err(_) => {
            records.remove_unread(name)?;
            Ok("forgotten".to_owned())
        }
    }
}
