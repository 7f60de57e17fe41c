//! The engine Slurm: a batch script that starts an agent on each node by srun.
//!
//! `scontrol` reports Slurm's state of a job. The job's script (`script.rs`) writes the rest into the folder of the job, which
//! login nodes and compute nodes have to share. `state.rs` reads both.

mod command;
mod options;
mod script;
mod state;

use std::cell::Cell;
use std::fs;
use std::io::{self, Write};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use accelerator_host::cli::{Error, Result};
use accelerator_host::process::on_path;

use super::{
    Engine, LogsMode, LogsRequest, Submitted, tensorboard_address, tensorboard_last_line,
    write_token,
};
use crate::job::{
    Failure, Instance, JobDetails, JobRecord, JobStatus, LAST_LINES, NodeUsage, Role, node_log,
    read_failure,
};
use crate::output::{copy_tail, follow, last_lines};
use crate::spec::{JobName, JobSpec};
use command::{sbatch, slurm};
use script::{AgentFiles, Submission};
use state::{
    READY, Run, RunEnd, SlurmJob, agent_exit, batch_log, is_output_of, nodes, out_of_memory,
};

#[derive(Debug)]
pub(crate) struct SlurmEngine;

/// The interval between two requests to Slurm's controller, which all users share.
const POLL: Duration = Duration::from_secs(2);
/// The same while a user waits for a job to stop.
const STOP_POLL: Duration = Duration::from_millis(500);
/// The time that the processes of a job may take to end.
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
            // Slurm has forgotten a job that has ended; its script wrote its end.
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
            thread::sleep(STOP_POLL);
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

/// The exit code of an agent that asks for another start.
const AGAIN: i32 = accelerator_host::PREEMPTED_EXIT_CODE as i32;

/// Combines everything known of a job.
fn details(
    job: &JobRecord,
    folder: &Path,
    known: &SlurmJob,
    run: Option<Run>,
    end: Option<RunEnd>,
) -> JobDetails {
    let spec = &job.spec;
    let name = spec.name.as_str();
    let is_new_run = run
        .as_ref()
        .is_none_or(|run| run.restarts == known.restarts);
    let status = match known.status() {
        // The rest of its last run ends.
        JobStatus::Running if !is_new_run => JobStatus::Restarting,
        status => status,
    };
    let report = read_failure(&folder.join("logs"), name);
    let why = match (end, status) {
        (Some(end), JobStatus::Failed) if end.timed_out => {
            Some("its time limit is over".to_owned())
        }
        _ => known.why(),
    };
    let is_interrupted = status == JobStatus::Restarting || known.state == "NODE_FAIL";
    let lost = run.as_ref().filter(|_| is_interrupted).and_then(lost_nodes);
    let interruption = report
        .as_ref()
        .filter(|_| status == JobStatus::Restarting)
        .map(|failure| failure.reason.clone());
    let reasons: Vec<String> = [why.clone(), lost, interruption]
        .into_iter()
        .flatten()
        .collect();
    // A job that waits has the nodes of its last run.
    let run = run.filter(|_| is_new_run && status != JobStatus::Pending);
    let is_over = status.is_final();
    let gpus = spec.all_gpus();
    let failure = (status == JobStatus::Failed)
        .then(|| failure(spec, folder, known, end, report, why.as_deref()));
    JobDetails {
        name: name.to_owned(),
        trainer: "SLURM".to_owned(),
        status,
        reason: (!reasons.is_empty()).then(|| reasons.join("; ")),
        namespace: None,
        priority: known.qos.clone(),
        submitted: Some(job.submitted),
        started: known.started.filter(|_| run.is_some() || is_over),
        ended: known.ended.filter(|_| is_over),
        restarts: known.restarts,
        gpus_requested: gpus,
        gpus_allocated: if status == JobStatus::Running {
            gpus
        } else {
            0
        },
        instances: instances(spec, folder, known, status, run.as_ref()),
        tensorboard: tensorboard_address(folder)
            .or_else(|| tensorboard_last_line(folder))
            .filter(|_| spec.tensorboard && status == JobStatus::Running),
        failure,
    }
}

fn instances(
    spec: &JobSpec,
    folder: &Path,
    known: &SlurmJob,
    status: JobStatus,
    run: Option<&Run>,
) -> Vec<Instance> {
    let instance = |node: usize| {
        let exit_code = run.and_then(|_| agent_exit(folder, node));
        let node_status = match (status, exit_code) {
            (JobStatus::Stopped, _) | (_, None) => status,
            (_, Some(0)) => JobStatus::Succeeded,
            (JobStatus::Running, Some(AGAIN)) => JobStatus::Restarting,
            (_, Some(_)) => JobStatus::Failed,
        };
        Instance {
            node: run.and_then(|run| run.nodes.get(node).cloned()),
            started: run.map(|run| run.started),
            ended: known.ended.filter(|_| status.is_final()),
            restarts: known.restarts,
            exit_code,
            ..Instance::new(spec.name.as_str(), node, node_status)
        }
    };
    (0..spec.nodes.get()).map(instance).collect()
}

/// Returns the nodes of a job that do not work now, in Slurm's words.
fn lost_nodes(run: &Run) -> Option<String> {
    // The job is shown even if nodes cannot be listed.
    let nodes = nodes().ok()?;
    let lost: Vec<String> = nodes
        .iter()
        .filter(|node| run.nodes.contains(&node.name) && node.status != READY)
        .map(|node| format!("node {} is {}", node.name, node.status))
        .collect();
    (!lost.is_empty()).then(|| lost.join(", "))
}

/// Returns the failure of a job: the report of its launcher, else Slurm's.
fn failure(
    spec: &JobSpec,
    folder: &Path,
    known: &SlurmJob,
    end: Option<RunEnd>,
    report: Option<Failure>,
    why: Option<&str>,
) -> Failure {
    let name = |node| Role::instance_name(spec.name.as_str(), node);
    let oom = out_of_memory(folder);
    match (report, oom) {
        // Slurm knows the cause.
        (Some(mut report), Some(node)) if report.instance == Some(name(node)) => {
            report
                .reason
                .push_str(" (Out Of Memory, as Slurm says); give more --memory");
            return report;
        }
        (Some(report), _) => return report,
        (None, _) => {}
    }
    let last = |path: &Path| last_lines(path, LAST_LINES).unwrap_or_default();
    let mut lines = last(&node_log(folder, oom.unwrap_or(0)));
    if lines.is_empty() {
        lines = last(&batch_log(folder));
    }
    let code = end.map_or(known.exit.0, |end| end.code);
    Failure {
        instance: oom.map(name),
        exit_code: (code != 0).then_some(code),
        reason: match oom {
            Some(_) => "it was killed for want of memory; give more --memory".to_owned(),
            None => why.unwrap_or("the agents failed").to_owned(),
        },
        last_lines: lines,
    }
}

impl RunEnd {
    /// Returns the state that Slurm would show if it had not forgotten the job.
    fn as_slurm_has_it(self, run: &Run) -> SlurmJob {
        SlurmJob {
            state: if self.code == 0 && !self.signalled {
                "COMPLETED".to_owned()
            } else {
                "FAILED".to_owned()
            },
            reason: self.signalled.then(|| {
                "Slurm ended it: it was cancelled or preempted, or its time was over".to_owned()
            }),
            restarts: run.restarts,
            exit: (self.code, 0),
            started: Some(run.started),
            ended: Some(self.ended),
            output: None,
            qos: None,
        }
    }
}
