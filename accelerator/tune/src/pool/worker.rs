use std::net::TcpStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use super::joint::JointMessages;
use super::listener::Connection;
use crate::checkpoint_folder;
use crate::host::TrialProcess;
use crate::runner::{Location, RunnerEvent, TrialStart};
use crate::trial::protocol::{self, ToWorker};
use crate::trial_id::TrialId;

/// A process that carries out trials, one at a time.
#[derive(Debug)]
pub(super) struct Worker {
    pub(super) process: TrialProcess,
    pub(super) slot: usize,
    /// Connections, by rank.
    pub(super) links: Vec<Option<Arc<TcpStream>>>,
    pub(super) location: Option<Location>,
    /// The trial that it carries out, or is about to.
    pub(super) start: Option<TrialStart>,
    pub(super) joint: JointMessages,
    /// The checkpoint that is being saved, and its iteration.
    pub(super) saving: Option<(PathBuf, u64)>,
    pub(super) iteration: u64,
    pub(super) closed: Option<Instant>,
    /// The number of its connections that are open.
    pub(super) open: usize,
    pub(super) has_exited: bool,
    /// The event to send once it has exited: a device is free then.
    pub(super) on_exit: Option<RunnerEvent>,
    /// The reason for its failure, in its own words.
    pub(super) failure: Option<String>,
}

impl Worker {
    pub(super) fn new(process: TrialProcess, slot: usize, ranks: usize) -> Self {
        Self {
            process,
            slot,
            links: (0..ranks).map(|_| None).collect(),
            location: None,
            start: None,
            joint: JointMessages::new(ranks),
            saving: None,
            iteration: 0,
            closed: None,
            open: 0,
            has_exited: false,
            on_exit: None,
            failure: None,
        }
    }

    /// The trial that it carries out, or whose end is told when it has exited.
    pub(super) fn trial(&self) -> Option<TrialId> {
        let start = self.start.as_ref().map(|start| start.trial);
        start.or_else(|| self.on_exit.as_ref().map(RunnerEvent::trial))
    }

    pub(super) fn is_connected(&self) -> bool {
        self.closed.is_none() && self.links.iter().all(Option::is_some)
    }

    pub(super) fn connect(&mut self, connection: Connection) {
        self.open += 1;
        if connection.rank == 0 {
            self.location = Some(Location {
                host: connection.host,
                pid: connection.pid,
            });
        }
        if let Some(link) = self.links.get_mut(connection.rank) {
            *link = Some(connection.stream);
        }
        self.send_start();
    }

    pub(super) fn assign(&mut self, start: TrialStart) {
        self.process.mark_log();
        self.start = Some(start);
        self.send_start();
    }

    fn send_start(&mut self) {
        if !self.is_connected() {
            return;
        }
        if let Some(start) = self.start.clone() {
            self.send(&ToWorker::Start {
                trial: start.trial,
                config: start.config,
                folder: start.folder,
                restore: start.restore,
            });
        }
    }

    pub(super) fn save(
        &mut self,
        folder: PathBuf,
        message: impl FnOnce(PathBuf) -> ToWorker,
    ) -> ToWorker {
        let partial = checkpoint_folder::partial(&folder);
        self.saving = Some((folder, self.iteration));
        message(partial)
    }

    pub(super) fn send(&self, message: &ToWorker) {
        for link in self.links.iter().flatten() {
            // One that does not listen any more is about to be noticed.
            let _ = protocol::send(link, message);
        }
    }
}
