//! An attempt of a job before its end: its settings, output and store, and the ranks that were started for it.

use std::path::Path;
use std::sync::mpsc::Sender;
use std::thread;
use std::time::{Duration, Instant};

use accelerator_host::process::allow_descriptors;

use super::group::{Watch, watch};
use super::shim::KillOnDrop;
use super::spawner::Spawner;
use super::store::{RankReports, Store};
use crate::error::{BEFORE_START, Error, Result, ended_by};
use crate::event::{Channel, Event};
use crate::output::{Output, Stream};
use crate::process::RankProcess;
use crate::settings::Settings;
use crate::settings::rank_env::RankEnv;

/// The time that the last lines of a rank may take to arrive after its end.
const STDERR_WITHIN: Duration = Duration::from_millis(50);

/// One group of an attempt, before it runs. Its ranks are still to be started, or, after a regroup, carried over from the
/// group before.
#[derive(Debug)]
pub(crate) struct Attempt {
    pub(super) settings: Settings,
    pub(super) output: Output,
    pub(super) rank_reports: RankReports,
    pub(super) store: Store,
    /// The parts that were begun with the group before, if ranks of it run already.
    pub(super) carried: Option<Carried>,
}

/// The parts that one group of an attempt leaves to the next.
#[derive(Debug)]
pub(super) struct Carried {
    /// The processes by rank.
    pub(super) processes: Vec<Box<dyn RankProcess>>,
    /// The watches by rank.
    pub(super) watches: Vec<Watch>,
    /// The number of streams that are being read.
    pub(super) readers: usize,
    /// Kills all of them if the launcher fails.
    pub(super) guard: KillOnDrop,
}

impl Attempt {
    /// Opens the output, the log files and the store; all report to `channel`.
    ///
    /// # Errors
    /// When a log file cannot be made, or the store cannot listen.
    pub(crate) fn prepare(settings: Settings, channel: &Channel) -> Result<Self> {
        let output = Output::open(
            settings.layout.ranks(),
            settings.prefix,
            settings.log_dir.as_deref(),
            settings.restart,
            settings.on_output_error,
            channel.sender.clone(),
        )?;
        let rank_reports = RankReports::default();
        let observer = {
            let (rank_reports, events) = (rank_reports.clone(), channel.sender.clone());
            move |report| rank_reports.record(report, &events)
        };
        let store = Store::open(&settings, observer)?;
        Ok(Self {
            settings,
            output,
            rank_reports,
            store,
            carried: None,
        })
    }

    /// The same for the group that follows one with this output and store; `former` gives, for
    /// each rank of this group, its rank in the one before. All
    /// report to `channel`, and to `wake` that they have.
    pub(super) fn next(
        output: &Output,
        store: &Store,
        settings: Settings,
        former: &[Option<usize>],
        channel: &Channel,
        wake: Sender<Event>,
    ) -> Result<Self> {
        let suffix = match settings.restart {
            0 => format!(".group-{}", settings.regroups),
            restart => format!(".restart-{restart}.group-{}", settings.regroups),
        };
        let output = output.regrouped(former, settings.log_dir.as_deref(), &suffix)?;
        let rank_reports = RankReports::default();
        let observer = {
            let (rank_reports, events) = (rank_reports.clone(), channel.sender.clone());
            move |report| {
                rank_reports.record(report, &events);
                let _ = wake.send(Event::Message);
            }
        };
        let store = store.open_next(&settings, observer)?;
        Ok(Self {
            settings,
            output,
            rank_reports,
            store,
            carried: None,
        })
    }

    pub(crate) fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Returns the number of ranks on this host.
    pub(crate) fn ranks(&self) -> usize {
        self.settings.ranks.get()
    }

    /// The output for the lines of the launcher itself.
    pub(crate) fn output(&self) -> &Output {
        &self.output
    }
}

/// Starts the ranks of an attempt; returns the rank that cannot be started, if there is one.
pub(super) fn start(
    settings: &Settings,
    store: &Store,
    output: &Output,
    spawner: &dyn Spawner,
    package_dir: Option<&Path>,
    channel: &Channel,
) -> Result<std::result::Result<Carried, (usize, Error)>> {
    let token = store.token_file();
    let environment = RankEnv::new(settings, store.address().port(), token, package_dir);
    let ranks = settings.layout.ranks();
    // Pipes, watches and connections to the store. If there are too few, starting a rank fails with an error that says so.
    let _ = allow_descriptors(8 * ranks as u64 + 64);
    let mut processes = Vec::with_capacity(ranks);
    let guard = KillOnDrop::new();
    spawner.begin(settings, store.address())?;
    for rank in 0..ranks {
        interrupted(channel)?;
        match spawner.spawn(rank, &environment) {
            Ok(process) => processes.push(process),
            Err(error) => return Ok(Err((rank, error))),
        }
    }
    let mut readers = 0;
    let mut watches = Vec::with_capacity(ranks);
    for (rank, process) in processes.iter_mut().enumerate() {
        readers += read_output(rank, &mut **process, output)?;
        watches.push(watch(rank, &**process, &channel.sender));
    }
    Ok(Ok(Carried {
        processes,
        watches,
        readers,
        guard,
    }))
}

/// The error of a launcher that receives a signal while it starts ranks: there may be thousands.
fn interrupted(channel: &Channel) -> Result<()> {
    match channel.events.try_recv() {
        Ok(Event::Signal(signal)) => Err(ended_by(signal, BEFORE_START)),
        Ok(event) => {
            // Kept for when all run. It can be sent, since the receiver is here.
            let _ = channel.sender.send(event);
            Ok(())
        }
        Err(_) => Ok(()),
    }
}

/// Starts the readers of the streams of a rank, and returns their number.
pub(super) fn read_output(
    rank: usize,
    process: &mut dyn RankProcess,
    output: &Output,
) -> Result<usize> {
    let pipes = [
        (Stream::Out, process.take_stdout()),
        (Stream::Err, process.take_stderr()),
    ];
    let mut readers = 0;
    for (stream, pipe) in pipes {
        if let Some(pipe) = pipe {
            output.read(rank, stream, pipe)?;
            readers += 1;
        }
    }
    Ok(readers)
}

/// Returns the last lines of the standard error of `rank`, which has ended; they may take a moment to arrive.
pub(super) fn last_lines(output: &Output, rank: usize) -> Vec<String> {
    wait_until(STDERR_WITHIN, || output.is_stderr_drained(rank));
    output.stderr_tail(rank)
}

/// Returns `true` once `is_so` does, or `false` after `limit`.
pub(super) fn wait_until(limit: Duration, is_so: impl Fn() -> bool) -> bool {
    let until = Instant::now() + limit;
    while !is_so() {
        if Instant::now() >= until {
            return false;
        }
        thread::sleep(Duration::from_millis(2));
    }
    true
}
