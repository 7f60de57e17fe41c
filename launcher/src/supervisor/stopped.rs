//! Says that ranks are stopped where all of them are: then none is left to name another.

use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use crate::output::Output;
use crate::process::RankProcess;
use crate::process::descendants::{RunState, state_of};
use crate::supervisor::signals;
use crate::supervisor::store::StoreHandle;
use crate::text::list;

/// How often ranks are looked at, at most.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// A watch over the ranks of this host; it ends when this is dropped.
#[derive(Debug)]
pub(crate) struct StopWatch {
    _running: Sender<()>,
}

impl StopWatch {
    /// Reports to `output` once which ranks of `group` are stopped, after none of this host has run for `limit`. If they
    /// were stopped through the launcher, as by Ctrl-Z, the user knows it, and `store` does not take their silence for a
    /// failure.
    ///
    /// The job continues: whoever has stopped them may continue them.
    pub(crate) fn over(
        group: &[Box<dyn RankProcess>],
        limit: Duration,
        output: &Output,
        store: Option<StoreHandle>,
    ) -> Self {
        let ranks = group.iter().enumerate();
        let ranks = ranks.filter_map(|(rank, process)| Some((rank, process.local_pid()?)));
        let (ranks, output): (Vec<(usize, i32)>, _) = (ranks.collect(), output.clone());
        let (running, ended) = mpsc::channel();
        let watch = move || {
            let mut since: Option<Instant> = None;
            let mut is_told = false;
            while ended.recv_timeout(LOOK_EVERY.min(limit / 4)) == Err(RecvTimeoutError::Timeout) {
                let stopped = stopped(&ranks);
                let is_on_purpose = !stopped.is_empty() && signals::is_suspended();
                if is_on_purpose && let Some(store) = &store {
                    store.forgive_silence();
                }
                if stopped.is_empty() || is_on_purpose {
                    since = None;
                    continue;
                }
                let since = *since.get_or_insert_with(Instant::now);
                if since.elapsed() >= limit && !is_told {
                    is_told = true;
                    output.note(&text(&stopped, since.elapsed()));
                }
            }
        };
        // Without a thread nobody tells.
        let _ = thread::Builder::new().name("stopped".into()).spawn(watch);
        Self { _running: running }
    }
}

/// The ranks that are stopped, where no other one runs.
fn stopped(ranks: &[(usize, i32)]) -> Vec<(usize, i32)> {
    let states = ranks
        .iter()
        .map(|&(rank, pid)| ((rank, pid), state_of(pid)));
    let mut stopped = Vec::new();
    for (rank, state) in states {
        match state {
            RunState::Running => return Vec::new(),
            RunState::Stopped => stopped.push(rank),
            RunState::Ended => {}
        }
    }
    stopped
}

fn text(stopped: &[(usize, i32)], waited: Duration) -> String {
    let ranks: Vec<usize> = stopped.iter().map(|(rank, _)| *rank).collect();
    let pids = stopped.iter().map(|(_, pid)| format!(" {pid}"));
    format!(
        "{} stopped, as by SIGSTOP, and no rank has run for {:.1} s; the job waits: continue with `kill -CONT{}`, or end \
         this launcher",
        match ranks.len() {
            1 => format!("{} is", list(&ranks)),
            _ => format!("{} are", list(&ranks)),
        },
        waited.as_secs_f64(),
        pids.collect::<String>()
    )
}
