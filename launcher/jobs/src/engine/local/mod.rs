//! The local engine: the nodes of a job are agents on this machine.
//!
//! A supervisor process (`supervisor.rs`) starts one agent per node and outlives the terminal. It writes its state to
//! `state.json` in the job's folder, next to the output of each agent.

mod state;
mod supervisor;

use std::fs::{self, File};
use std::io::Write;
use std::num::NonZeroUsize;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use accelerator_host::cli::{Error, Result};
use accelerator_host::machine::host_name;
use accelerator_host::process::on_path;
use rustix::process::{Pid, Signal, kill_process};

use super::{Engine, LogsMode, LogsRequest, Submitted, tensorboard_address};
use crate::job::{
    Instance, JobDetails, JobRecord, JobStatus, NodeUsage, launcher_restarts, node_log,
};
use crate::output::{copy_tail, follow, now, shell_line};
use crate::spec::{JobSpec, launcher_here};
use state::{LocalState, POLL};
use supervisor::agent_words;
pub(crate) use supervisor::supervise;

/// Returns `true` if the job with this folder runs, or may run.
pub(crate) fn may_run(folder: &Path) -> bool {
    LocalState::is_supervised(folder).unwrap_or(true)
}

/// Jobs of this machine.
#[derive(Debug)]
pub(crate) struct LocalEngine;

/// The hidden command that is the supervisor of a job.
pub(crate) const SUPERVISE: &str = "__supervise";

/// The file for the messages of the supervisor.
const SUPERVISOR_LOG: &str = "supervisor.log";
/// The time that a supervisor may take to start, and to end its agents.
const START_LIMIT: Duration = Duration::from_secs(10);
const STOP_LIMIT: Duration = Duration::from_secs(60);

impl Engine for LocalEngine {
    fn render(&self, spec: &JobSpec) -> Result<String> {
        let mut text = String::new();
        for node in 0..spec.nodes.get() {
            let words = agent_words(spec, node, "127.0.0.1:PORT", Path::new("JOB_DIR"))?;
            text.push_str(&shell_line(&words));
            text.push('\n');
        }
        Ok(text)
    }

    fn submit(&self, spec: &JobSpec, folder: &Path) -> Result<Submitted> {
        spec.program_file()?;
        launcher_here()?;
        if let Some(folder) = spec
            .working_dir
            .as_deref()
            .filter(|folder| !folder.is_dir())
        {
            return Err(Error::usage(format!(
                "--working-dir {} is no folder of this machine",
                folder.display()
            )));
        }
        if spec.tensorboard && on_path("tensorboard").is_none() {
            return Err(Error::usage(
                "--tensorboard needs the program tensorboard on the PATH: pip install tensorboard",
            ));
        }
        let failed = |what: &str| {
            let message = format!("the supervisor of job {} {what}", spec.name);
            move |error| Error::system(message).with_source(error)
        };
        let program = std::env::current_exe().map_err(failed("has no program"))?;
        let log = File::create(folder.join(SUPERVISOR_LOG)).map_err(failed("cannot write"))?;
        let mut command = Command::new(program);
        command
            .arg(SUPERVISE)
            .arg(folder)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log);
        // Neither Ctrl-C nor the end of this terminal reaches it.
        let mut child = command
            .process_group(0)
            .spawn()
            .map_err(failed("cannot start"))?;
        let deadline = Instant::now() + START_LIMIT;
        while LocalState::read(folder).is_none() {
            let ended = child.try_wait().map_err(failed("cannot be watched"))?;
            if ended.is_some() || Instant::now() > deadline {
                end_supervisor(&mut child);
                let said = fs::read_to_string(folder.join(SUPERVISOR_LOG)).unwrap_or_default();
                let why = match said.trim() {
                    "" => format!("it wrote no state in {} s", START_LIMIT.as_secs()),
                    said => said.to_owned(),
                };
                return Err(Error::system(format!(
                    "the supervisor of job {} did not start: {why}",
                    spec.name
                )));
            }
            thread::sleep(POLL);
        }
        Ok(Submitted {
            id: child.id().to_string(),
            created: vec![format!("job/{} created", spec.name)],
        })
    }

    fn get(&self, job: &JobRecord, folder: &Path) -> Result<JobDetails> {
        let Some(state) = LocalState::current(folder) else {
            return Err(Error::not_found(format!(
                "{} has no state of a job",
                folder.display()
            )));
        };
        let spec = &job.spec;
        let status = state.status;
        let gpus = spec.all_gpus();
        let failure = (status == JobStatus::Failed)
            .then(|| state.failure(spec, folder))
            .flatten();
        Ok(JobDetails {
            name: spec.name.to_string(),
            trainer: "LOCAL".to_owned(),
            status,
            reason: state.reason.clone(),
            namespace: None,
            priority: None,
            submitted: Some(job.submitted),
            started: Some(state.started),
            ended: state.ended,
            restarts: state.nodes.iter().map(|node| node.restarts).sum::<u32>()
                + launcher_restarts(&folder.join("logs")),
            gpus_requested: gpus,
            gpus_allocated: if status.is_active() { gpus } else { 0 },
            instances: state.instances(spec),
            tensorboard: tensorboard_address(folder)
                .filter(|_| spec.tensorboard && status.is_active()),
            failure,
        })
    }

    fn logs(
        &self,
        _job: &JobRecord,
        folder: &Path,
        request: &LogsRequest,
        output: &mut dyn Write,
    ) -> Result<()> {
        let path = node_log(folder, request.node);
        match request.mode {
            LogsMode::Once => copy_tail(&path, request.tail, output),
            LogsMode::Follow => follow(&path, request.tail, output, || {
                LocalState::current(folder).is_none_or(|state| state.status.is_final())
            }),
        }
    }

    fn stop(&self, job: &JobRecord, folder: &Path) -> Result<()> {
        let look = || {
            LocalState::is_supervised(folder).map_err(|error| {
                let message = format!("whether the job runs is not known: {}", folder.display());
                Error::system(message).with_source(error)
            })
        };
        // A submission that has just begun has no supervisor yet.
        let is_beginning = || now() <= job.submitted + START_LIMIT.as_secs();
        while LocalState::read(folder).is_none() && !look()? && is_beginning() {
            thread::sleep(POLL);
        }
        let deadline = Instant::now() + STOP_LIMIT;
        let mut signalled = None;
        while look()? {
            let supervisor = LocalState::supervisor(folder);
            if signalled != supervisor {
                if let Some(supervisor) = &supervisor {
                    supervisor.signal(Signal::TERM);
                }
                signalled.clone_from(&supervisor);
            }
            if Instant::now() > deadline {
                let process =
                    supervisor.map_or("?".to_owned(), |supervisor| supervisor.pid.to_string());
                return Err(Error::system(format!(
                    "the supervisor of the job (process {process}) does not end; see {}",
                    folder.join(SUPERVISOR_LOG).display()
                )));
            }
            thread::sleep(POLL);
        }
        // If the supervisor was killed, its agents still run.
        if let Some(state) = LocalState::read(folder) {
            state.end_agents(deadline);
        }
        Ok(())
    }

    fn nodes(&self) -> Result<Vec<NodeUsage>> {
        let cpus = thread::available_parallelism().map_or(1, NonZeroUsize::get);
        Ok(vec![NodeUsage {
            name: host_name(),
            address: "127.0.0.1".to_owned(),
            role: "<none>".to_owned(),
            status: "ready".to_owned(),
            gpus: gpu_count(),
            gpus_allocated: 0,
            cpus: cpus as f64,
            cpus_allocated: 0.0,
        }])
    }
}

/// Ends a supervisor that did not start, and with it the agents that it may have started.
fn end_supervisor(child: &mut Child) {
    let deadline = Instant::now() + START_LIMIT;
    // It may have ended by itself.
    let _ = kill_process(Pid::from_child(child), Signal::TERM);
    while matches!(child.try_wait(), Ok(None)) && Instant::now() < deadline {
        thread::sleep(POLL);
    }
    let _ = child.kill();
    let _ = child.wait();
}

/// Counts NVIDIA's GPUs by the device files of the driver.
fn gpu_count() -> usize {
    let Ok(entries) = fs::read_dir("/dev") else {
        return 0;
    };
    let is_gpu = |name: &str| {
        name.strip_prefix("nvidia")
            .is_some_and(|rest| rest.parse::<u32>().is_ok())
    };
    entries
        .flatten()
        .filter(|entry| entry.file_name().to_str().is_some_and(is_gpu))
        .count()
}

impl LocalState {
    fn instances(&self, spec: &JobSpec) -> Vec<Instance> {
        let node_status = |code: Option<i32>| match (self.status, code) {
            (_, Some(0)) => JobStatus::Succeeded,
            (JobStatus::Stopped, _) => JobStatus::Stopped,
            (_, Some(_)) => JobStatus::Failed,
            (status, None) => status,
        };
        let host = host_name();
        let instance = |(node, state): (usize, &state::NodeState)| Instance {
            node: Some(host.clone()),
            started: Some(self.started),
            ended: state.ended,
            restarts: state.restarts,
            exit_code: state.exit_code,
            reason: state.reason.clone(),
            ..Instance::new(spec.name.as_str(), node, node_status(state.exit_code))
        };
        self.nodes.iter().enumerate().map(instance).collect()
    }
}
