//! The engine Slurm: a batch script that starts an agent on each node by srun.
//!
//! What Slurm knows of a job is asked of `scontrol` (`state.rs`). What only the job knows, its script writes into the folder
//! of the job (`script.rs`, `run.rs`), which login nodes and compute nodes have to share.

mod command;
mod details;
mod options;
mod quote;
mod run;
mod script;
mod state;

use std::cell::Cell;
use std::fs;
use std::io::{self, Write};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use super::{Engine, LogsMode, LogsRequest, Submitted, write_token};
use crate::error::{Error, Result};
use crate::job::{JobDetails, JobRecord, NodeUsage, node_log};
use crate::spec::{JobName, JobSpec, on_path};
use crate::tail::{copy_tail, follow};
use command::{sbatch, slurm};
use details::details;
use run::{Run, RunEnd};
use script::{AgentFiles, Submission};
use state::{SlurmJob, is_output_of};

/// Jobs of Slurm.
#[derive(Debug)]
pub(crate) struct SlurmEngine;

/// How often Slurm's controller, which all users share, is asked.
const POLL: Duration = Duration::from_secs(2);
/// How long the processes of a job may take to end.
const STOP_LIMIT: Duration = Duration::from_secs(120);

impl SlurmEngine {
    /// Finds Slurm's commands.
    ///
    /// # Errors
    /// When they are not there.
    pub(crate) fn connect() -> Result<Self> {
        match on_path("sbatch") {
            Some(_) => Ok(Self),
            None => Err(Error::usage(
                "sbatch is not on the PATH: jobs of Slurm are submitted and shown on its login nodes",
            )),
        }
    }
}

impl Engine for SlurmEngine {
    fn render(&self, spec: &JobSpec) -> Result<String> {
        options::check_environment()?;
        let files = AgentFiles::here(spec)?;
        Ok(Submission::of(spec, Path::new("JOB_DIR"), &files)?.shown())
    }

    fn submit(&self, spec: &JobSpec, folder: &Path) -> Result<Submitted> {
        options::check_environment()?;
        let files = AgentFiles::here(spec)?;
        let submission = Submission::of(spec, folder, &files)?;
        let failed = |error: io::Error| {
            Error::system(format!("{} cannot be written", folder.display())).with_source(error)
        };
        write_token(folder)?;
        if spec.options.slurm.broadcast.is_some() {
            for (from, to) in [
                (files.launcher, script::COPIED_LAUNCHER),
                (files.program, script::COPIED_PROGRAM),
            ] {
                fs::copy(&from, folder.join(to)).map_err(failed)?;
            }
        }
        let said = sbatch(&submission.options, &submission.script).map_err(|error| match error
            .is_unreachable()
        {
            true => withdraw(folder, error),
            false => error,
        })?;
        // `ID`, or `ID;CLUSTER`.
        let id = said.trim().split(';').next().unwrap_or_default().to_owned();
        if id.parse::<u64>().is_err() {
            let error = Error::refused(format!(
                "expected the number of a job from sbatch, found {:?}",
                said.trim()
            ));
            return Err(withdraw(folder, error));
        }
        Ok(Submitted {
            created: vec![format!("job {id} of Slurm created")],
            id,
        })
    }

    fn get(&self, job: &JobRecord, folder: &Path) -> Result<JobDetails> {
        let (run, end) = (Run::read(folder), RunEnd::read(folder));
        let known = match SlurmJob::of(job, folder) {
            Ok(known) => known,
            // It is over, and Slurm has forgotten it: how it ended, its script has written.
            Err(error) if error.is_not_found() => match (&run, end) {
                (Some(run), Some(end)) => end.as_slurm_has_it(run),
                _ => return Err(error),
            },
            Err(error) => return Err(error),
        };
        Ok(details(job, folder, &known, run, end))
    }

    fn logs(
        &self,
        job: &JobRecord,
        folder: &Path,
        request: &LogsRequest,
        output: &mut dyn Write,
    ) -> Result<()> {
        let path = node_log(folder, request.node);
        let asked: Cell<Option<Instant>> = Cell::new(None);
        let is_over = || {
            if asked.get().is_some_and(|asked| asked.elapsed() < POLL) {
                return false;
            }
            asked.set(Some(Instant::now()));
            match SlurmJob::of(job, folder) {
                Ok(known) => known.status().is_final(),
                // Slurm may answer again.
                Err(error) => !error.is_unreachable(),
            }
        };
        match request.mode {
            LogsMode::Once => copy_tail(&path, request.tail, output),
            LogsMode::Follow => follow(&path, request.tail, output, is_over),
        }
    }

    fn stop(&self, job: &JobRecord, folder: &Path) -> Result<()> {
        let name = &job.spec.name;
        let deadline = Instant::now() + STOP_LIMIT;
        let mut cancelled = false;
        loop {
            let known = match SlurmJob::of(job, folder) {
                Ok(known) if known.status().is_final() => return Ok(()),
                Err(error) if error.is_not_found() => return Ok(()),
                known => known?,
            };
            if !cancelled {
                match slurm("scancel", &[&job.id]) {
                    Err(error) if !error.is_not_found() => return Err(error),
                    _ => cancelled = true,
                }
            } else if Instant::now() > deadline {
                return Err(still_there(name, &job.id, &known));
            }
            thread::sleep(POLL / 4);
        }
    }

    fn nodes(&self) -> Result<Vec<NodeUsage>> {
        state::nodes()
    }

    fn pause(&self, _job: &JobRecord) {
        thread::sleep(POLL);
    }
}

/// Cancels the job that Slurm may have accepted although sbatch failed. Returns the error, and adds to it if this
/// fails, too.
fn withdraw(folder: &Path, error: Error) -> Error {
    let fields = ["--me", "--noheader", "--Format", "JobID:|,STDOUT:|"];
    let cancelled = slurm("squeue", &fields).and_then(|lines| {
        // The folder is this job's alone.
        let ids = lines.lines().filter_map(|line| {
            let (id, output) = line.trim_end_matches('|').split_once('|')?;
            is_output_of(output, folder).then(|| id.trim().to_owned())
        });
        let cancel = |id: String| slurm("scancel", &[&id]).map(drop);
        ids.collect::<Vec<_>>().into_iter().try_for_each(cancel)
    });
    match cancelled {
        Ok(()) => error,
        Err(_) => Error::unreachable(format!(
            "{error}; Slurm may have taken the job all the same: see `squeue --me`, and end it by scancel"
        )),
    }
}

fn still_there(name: &JobName, id: &str, known: &SlurmJob) -> Error {
    Error::system(format!(
        "job {name} is cancelled, but has not ended after {} s: Slurm has it as {}; a node of it may be lost (`scontrol show \
         job {id}`)",
        STOP_LIMIT.as_secs(),
        known.state
    ))
}
