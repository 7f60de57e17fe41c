//! A rank on another host, as the supervisor sees it.

use std::fs::File;
use std::sync::Arc;

use rustix::process::Signal;

use super::host::Host;
use super::message::{SignalScope, ToHost};
use crate::output::Stream;
use crate::process::{End, RankProcess};

/// A rank on another host.
#[derive(Debug)]
pub(super) struct RemoteProcess {
    host: Arc<Host>,
    restart: u64,
    rank: usize,
    pid: i32,
    output: [Option<File>; 2],
    is_over: bool,
}

impl RemoteProcess {
    /// `rank` of an attempt, whose process is `pid` on `host` and writes to `output`.
    pub(super) fn new(
        host: Arc<Host>,
        restart: u64,
        rank: usize,
        pid: i32,
        output: [Option<File>; 2],
    ) -> Self {
        Self {
            host,
            restart,
            rank,
            pid,
            output,
            is_over: false,
        }
    }

    fn send(&self, signal: Signal, scope: SignalScope) {
        self.host.say(&ToHost::Signal {
            restart: self.restart,
            rank: self.rank,
            signal: signal.as_raw(),
            scope,
        });
    }
}

impl RankProcess for RemoteProcess {
    fn pid(&self) -> i32 {
        self.pid
    }

    fn local_pid(&self) -> Option<i32> {
        None
    }

    fn host(&self) -> Option<String> {
        Some(self.host.info.name.clone())
    }

    fn loss(&self) -> Option<String> {
        self.host.loss_of(self.rank)
    }

    fn take_stdout(&mut self) -> Option<File> {
        self.output[Stream::Out as usize].take()
    }

    fn take_stderr(&mut self) -> Option<File> {
        self.output[Stream::Err as usize].take()
    }

    fn waiter(&self) -> Box<dyn FnOnce() -> End + Send> {
        let (host, restart, rank) = (Arc::clone(&self.host), self.restart, self.rank);
        Box::new(move || host.wait(restart, rank))
    }

    fn signal(&self, signal: Signal) {
        self.send(signal, SignalScope::Process);
    }

    fn signal_group(&self, signal: Signal) {
        self.send(signal, SignalScope::Group);
    }

    fn has_group(&self) -> bool {
        // Its host ends what is left there.
        false
    }

    fn reap(&mut self) {
        self.is_over = true;
    }

    fn abandon(&mut self) {
        self.is_over = true;
    }
}

impl Drop for RemoteProcess {
    fn drop(&mut self) {
        if !self.is_over {
            self.signal_group(Signal::KILL);
        }
    }
}
