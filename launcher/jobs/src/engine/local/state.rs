//! What the supervisor of a job writes for others to read.

use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::thread;
use std::time::Instant;

use rustix::fs::FlockOperation;
use rustix::process::Signal;
use serde::{Deserialize, Serialize};

use super::POLL;
use crate::engine::process::ProcessIdentity;
use crate::job::{Failure, JobStatus, LAST_LINES, Role, node_log, read_failure};
use crate::spec::JobSpec;
use crate::tail::last_lines;

const FILE: &str = "state.json";
/// Held by the supervisor for as long as it lives.
const LOCK: &str = "supervisor.lock";

/// How far a job is.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct LocalState {
    pub(super) supervisor: ProcessIdentity,
    pub(super) status: JobStatus,
    pub(super) reason: Option<String>,
    /// Seconds since 1970.
    pub(super) started: u64,
    pub(super) ended: Option<u64>,
    pub(super) nodes: Vec<NodeState>,
    pub(super) tensorboard: Option<String>,
}

/// How far the agent of a node is.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct NodeState {
    pub(super) agent: Option<ProcessIdentity>,
    pub(super) restarts: u32,
    /// Of an agent that is not started again; 128 + signal where a signal ended it.
    pub(super) exit_code: Option<i32>,
    pub(super) ended: Option<u64>,
    pub(super) reason: Option<String>,
}

impl LocalState {
    /// The state of the job of this folder, once its supervisor has written one.
    pub(super) fn read(folder: &Path) -> Option<Self> {
        serde_json::from_slice(&fs::read(folder.join(FILE)).ok()?).ok()
    }

    /// Writes the state whole, in place of the one before.
    pub(super) fn write(&self, folder: &Path) -> io::Result<()> {
        let mut file = tempfile::NamedTempFile::new_in(folder)?;
        serde_json::to_writer(&mut file, self)?;
        file.persist(folder.join(FILE))
            .map_err(|error| error.error)?;
        Ok(())
    }

    /// The state as it is now: that of a failure where nobody is left to write it.
    pub(super) fn current(folder: &Path) -> Option<Self> {
        let state = Self::read(folder)?;
        if state.status.is_final() || Self::is_supervised(folder) {
            return Some(state);
        }
        // The supervisor may have ended between the reading and the look at its lock.
        let mut state = Self::read(folder)?;
        if !state.status.is_final() {
            state.status = JobStatus::Failed;
            state.reason =
                Some("its supervisor was killed, or this machine was started again".to_owned());
        }
        Some(state)
    }

    /// The lock of a job's supervisor; `None` where another one holds it.
    pub(super) fn lock(folder: &Path) -> io::Result<Option<File>> {
        Self::try_lock(folder, FlockOperation::NonBlockingLockExclusive)
    }

    /// Whether the supervisor of a job lives.
    pub(super) fn is_supervised(folder: &Path) -> bool {
        // Shared, so that those who look at the same time do not take one another for it.
        matches!(
            Self::try_lock(folder, FlockOperation::NonBlockingLockShared),
            Ok(None)
        )
    }

    /// Tells the supervisor to end the job.
    pub(super) fn signal_supervisor(&self) {
        self.supervisor.signal(Signal::TERM);
    }

    /// Ends agents whose supervisor is gone.
    pub(super) fn end_agents(&self, deadline: Instant) {
        let agents: Vec<_> = self.nodes.iter().filter_map(|node| node.agent).collect();
        for agent in &agents {
            agent.signal(Signal::TERM);
        }
        while agents.iter().any(|agent| agent.is_alive()) {
            if Instant::now() > deadline {
                agents.iter().for_each(|agent| agent.signal(Signal::KILL));
                return;
            }
            thread::sleep(POLL);
        }
    }

    fn try_lock(folder: &Path, operation: FlockOperation) -> io::Result<Option<File>> {
        let file = File::options()
            .create(true)
            .append(true)
            .open(folder.join(LOCK))?;
        match rustix::fs::flock(&file, operation) {
            Ok(()) => Ok(Some(file)),
            Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// What failed: the node that ended first with an error.
    pub(super) fn failure(&self, spec: &JobSpec, folder: &Path) -> Option<Failure> {
        let failed = |node: &&(usize, &NodeState)| node.1.exit_code.is_some_and(|code| code != 0);
        let nodes: Vec<_> = self.nodes.iter().enumerate().collect();
        let (node, state) = nodes
            .iter()
            .filter(failed)
            .min_by_key(|(_, state)| state.ended)?;
        if let Some(failure) = read_failure(&folder.join("logs"), spec.name.as_str()) {
            return Some(failure);
        }
        Some(Failure {
            instance: Some(Role::instance_name(spec.name.as_str(), *node)),
            exit_code: state.exit_code,
            reason: state
                .reason
                .clone()
                .unwrap_or_else(|| "the agent failed".to_owned()),
            last_lines: last_lines(&node_log(folder, *node), LAST_LINES).unwrap_or_default(),
        })
    }
}
