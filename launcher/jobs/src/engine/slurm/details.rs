//! What is told of a job: what Slurm knows, what the job's script has written, what its launcher reports.

use std::path::Path;

use super::run::{Run, RunEnd, agent_exit, batch_log, out_of_memory, tensorboard};
use super::state::{READY, SlurmJob, nodes};
use crate::job::{
    Failure, Instance, JobDetails, JobRecord, JobStatus, LAST_LINES, Role, node_log, read_failure,
};
use crate::spec::JobSpec;
use crate::tail::last_lines;

/// An agent asks for another start.
const AGAIN: i32 = accelerator_env::PREEMPTED_EXIT_CODE as i32;

/// All that is known of a job.
pub(super) fn details(
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
        // What is left of its last run ends.
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
        tensorboard: tensorboard(folder)
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
        Instance {
            name: Role::instance_name(spec.name.as_str(), node),
            role: Role::of_node(node),
            status: match (status, exit_code) {
                (JobStatus::Stopped, _) | (_, None) => status,
                (_, Some(0)) => JobStatus::Succeeded,
                (JobStatus::Running, Some(AGAIN)) => JobStatus::Restarting,
                (_, Some(_)) => JobStatus::Failed,
            },
            node: run.and_then(|run| run.nodes.get(node).cloned()),
            started: run.map(|run| run.started),
            ended: known.ended.filter(|_| status.is_final()),
            restarts: known.restarts,
            exit_code,
            reason: None,
        }
    };
    (0..spec.nodes.get()).map(instance).collect()
}

/// The nodes of a job that do not work now, in Slurm's words.
fn lost_nodes(run: &Run) -> Option<String> {
    // The job is shown where nodes are not.
    let nodes = nodes().ok()?;
    let lost: Vec<String> = nodes
        .iter()
        .filter(|node| run.nodes.contains(&node.name) && node.status != READY)
        .map(|node| format!("node {} is {}", node.name, node.status))
        .collect();
    (!lost.is_empty()).then(|| lost.join(", "))
}

/// Why a job failed: what its launcher reports, else what Slurm says.
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
        // Slurm knows what killed it.
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
    /// What Slurm said before it forgot the job.
    pub(super) fn as_slurm_has_it(self, run: &Run) -> SlurmJob {
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
