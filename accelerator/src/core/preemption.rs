use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

use accelerator_host::sync::Mutex;
use signal_hook::consts::signal;
use signal_hook::{SigId, flag, low_level};

use super::error::{self, Error, Kind, Result};

/// The signals, deadline and file that announce to a rank that it will be ended soon. Pass it to
/// [`Accelerator::on_preemption`](crate::Accelerator::on_preemption).
///
/// ```
/// use std::time::{Duration, SystemTime};
///
/// use accelerator::{Preemption, PreemptionSignal};
///
/// // SIGTERM, SIGUSR1 and SIGUSR2.
/// let by_signals = Preemption::new();
/// // Slurm says when the job ends; this leaves two minutes to save.
/// let end = std::env::var("SLURM_JOB_END_TIME").ok().and_then(|end| end.parse().ok());
/// let end = end.map(|end| SystemTime::UNIX_EPOCH + Duration::from_secs(end));
/// let in_time = match end {
///     Some(end) => by_signals.with_deadline(end - Duration::from_secs(120)),
///     None => by_signals,
/// };
/// // `touch checkpoints/a/leave` ends the job, too; of signals, SIGUSR2 alone.
/// let preemption = in_time
///     .with_file("checkpoints/a/leave")
///     .with_signals([PreemptionSignal::Usr2]);
/// # let accelerator = accelerator::Accelerator::new()?;
/// accelerator.on_preemption(preemption)?;
/// # Ok::<(), accelerator::Error>(())
/// ```
#[derive(Clone, Debug)]
#[must_use = "`Accelerator::on_preemption` takes it"]
pub struct Preemption {
    deadline: Option<SystemTime>,
    file: Option<PathBuf>,
    signals: Vec<PreemptionSignal>,
}

/// A signal that announces a preemption.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub enum PreemptionSignal {
    /// SIGINT: Ctrl-C.
    Int,
    /// SIGTERM: what Slurm, Kubernetes and `accel-launch` send before they kill.
    Term,
    /// SIGUSR1: what Slurm's `--signal=USR1@120` sends. Some libraries handle it themselves.
    Usr1,
    /// SIGUSR2: what Slurm's `--signal=USR2@120` sends.
    Usr2,
}

impl Preemption {
    /// Watches SIGTERM, SIGUSR1 and SIGUSR2.
    pub fn new() -> Self {
        Self {
            deadline: None,
            file: None,
            signals: vec![
                PreemptionSignal::Term,
                PreemptionSignal::Usr1,
                PreemptionSignal::Usr2,
            ],
        }
    }

    /// Watches only these signals, or none if the list is empty. Signals that the system does not have are left out.
    pub fn with_signals(self, signals: impl IntoIterator<Item = PreemptionSignal>) -> Self {
        Self {
            signals: signals.into_iter().collect(),
            ..self
        }
    }

    /// Also gives notice from this moment on, by the host's clock. Choose it early enough that all ranks can save
    /// before the end.
    ///
    /// It is a time of day and no duration, so that it is the same one after a restart within an allocation.
    pub fn with_deadline(self, deadline: SystemTime) -> Self {
        Self {
            deadline: Some(deadline),
            ..self
        }
    }

    /// Also gives notice once this file exists, whatever its content. The file is looked for at most once a second.
    /// Remove it before the job is started again, or the new job finds it at once.
    pub fn with_file(self, path: impl Into<PathBuf>) -> Self {
        Self {
            file: Some(path.into()),
            ..self
        }
    }
}

impl Default for Preemption {
    fn default() -> Self {
        Self::new()
    }
}

/// The notices that this rank watches. Once it has been told to leave, this stays.
#[derive(Debug, Default)]
pub(crate) struct PreemptionNotice {
    deadline: Option<SystemTime>,
    files: Vec<PathBuf>,
    listeners: Vec<SignalListener>,
    looked_at: Option<Instant>,
    /// Set by handlers of signals, which do nothing else.
    received: Arc<AtomicBool>,
    told: bool,
}

impl PreemptionNotice {
    /// Watches this beside what it watches already.
    pub(crate) fn watch(&mut self, preemption: Preemption) -> Result<()> {
        for number in preemption.signals.into_iter().filter_map(number) {
            let listener = SignalListener::start(number, &self.received)?;
            self.listeners.push(listener);
        }
        self.deadline = self.deadline.into_iter().chain(preemption.deadline).min();
        self.files.extend(preemption.file);
        Ok(())
    }

    pub(crate) fn is_given(&mut self, rank: usize) -> bool {
        if self.told {
            return true;
        }
        let by = if self.received.load(Ordering::SeqCst) {
            "a signal"
        } else if self.deadline.is_some_and(|at| SystemTime::now() >= at) {
            "its deadline"
        } else if self.finds_file() {
            "its file"
        } else {
            return false;
        };
        error::tell(&format!(
            "rank {rank} is preempted, by {by}: all ranks learn of it in the next step"
        ));
        self.give();
        true
    }

    /// This rank is to leave, as it knows by itself or from the others.
    pub(crate) fn give(&mut self) {
        self.told = true;
        // What comes later must not end it while it saves, nor when it is about to end.
        self.received.store(true, Ordering::SeqCst);
    }

    fn finds_file(&mut self) -> bool {
        let is_early = |at: Instant| at.elapsed() < BETWEEN_LOOKS;
        if self.files.is_empty() || self.looked_at.is_some_and(is_early) {
            return false;
        }
        self.looked_at = Some(Instant::now());
        self.files.iter().any(|path| path.exists())
    }
}

/// A look at a file system of a network takes time.
const BETWEEN_LOOKS: Duration = Duration::from_secs(1);

/// `None` if the system has no such signal.
fn number(named: PreemptionSignal) -> Option<i32> {
    match named {
        PreemptionSignal::Int => Some(signal::SIGINT),
        PreemptionSignal::Term => Some(signal::SIGTERM),
        #[cfg(unix)]
        PreemptionSignal::Usr1 => Some(signal::SIGUSR1),
        #[cfg(unix)]
        PreemptionSignal::Usr2 => Some(signal::SIGUSR2),
        #[cfg(not(unix))]
        PreemptionSignal::Usr1 | PreemptionSignal::Usr2 => None,
    }
}

/// Sets a flag when a signal arrives, as long as it lives. Without any listener, the signal does what it does in a
/// program that has no handlers.
#[derive(Debug)]
pub(super) struct SignalListener {
    signal: i32,
    id: SigId,
    received: Arc<AtomicBool>,
}

impl SignalListener {
    pub(super) fn start(signal: i32, received: &Arc<AtomicBool>) -> Result<Self> {
        let failed = |error| {
            let message = format!("the handler of signal {signal} could not be installed");
            Error::new(Kind::Io, message).with_source(error)
        };
        let mut handled = HANDLED.lock();
        let listeners = match handled.entry(signal) {
            Entry::Occupied(listeners) => listeners.into_mut(),
            Entry::Vacant(place) => {
                let has_none = Arc::new(AtomicBool::new(true));
                flag::register_conditional_default(signal, has_none.clone()).map_err(failed)?;
                place.insert(Listeners { count: 0, has_none })
            }
        };
        let id = flag::register(signal, received.clone()).map_err(failed)?;
        listeners.count += 1;
        listeners.has_none.store(false, Ordering::SeqCst);
        Ok(Self {
            signal,
            id,
            received: received.clone(),
        })
    }
}

impl Drop for SignalListener {
    /// Stops listening, unless a signal has arrived: the process is about to end with an exit code of its own, and
    /// another signal must not end it before.
    fn drop(&mut self) {
        if self.received.load(Ordering::SeqCst) {
            return;
        }
        if let Some(listeners) = HANDLED.lock().get_mut(&self.signal) {
            listeners.count -= 1;
            listeners
                .has_none
                .store(listeners.count == 0, Ordering::SeqCst);
        }
        low_level::unregister(self.id);
    }
}

struct Listeners {
    count: usize,
    /// Read by the handler, which does what the system would do.
    has_none: Arc<AtomicBool>,
}

/// The listeners of each signal that this process has ever listened to.
static HANDLED: Mutex<BTreeMap<i32, Listeners>> = Mutex::new(BTreeMap::new());

#[cfg(test)]
#[cfg(unix)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;

    use signal_hook::consts::{SIGUSR1, SIGUSR2};

    use super::*;

    fn listen(signal: i32) -> (SignalListener, Arc<AtomicBool>) {
        let received = Arc::default();
        (SignalListener::start(signal, &received).unwrap(), received)
    }

    #[test]
    fn each_listener_hears_a_signal_as_long_as_it_lives() {
        let [(_first, at_first), (_second, at_second), (gone, at_gone)] =
            [(); 3].map(|()| listen(SIGUSR1));
        drop(gone);
        low_level::raise(SIGUSR1).unwrap();
        let heard = [at_first, at_second, at_gone].map(|flag| flag.load(Ordering::SeqCst));
        assert_eq!(heard, [true, true, false]);
    }

    /// A process that a signal ends once nothing listens to it any more.
    #[test]
    #[ignore = "a part of another test"]
    fn end_a_child() {
        drop(listen(SIGUSR2));
        low_level::raise(SIGUSR2).unwrap();
    }

    /// Ends well: who has heard a signal once is not ended by another one.
    #[test]
    #[ignore = "a part of another test"]
    fn do_not_end_a_child() {
        let (listener, received) = listen(SIGUSR2);
        low_level::raise(SIGUSR2).unwrap();
        assert!(received.load(Ordering::SeqCst));
        drop(listener);
        low_level::raise(SIGUSR2).unwrap();
    }

    #[test]
    fn a_signal_ends_the_process_when_the_last_listener_is_gone_that_has_not_heard_it() {
        let end = |test: &str| {
            let name = format!("core::preemption::tests::{test}");
            let mut command = Command::new(std::env::current_exe().unwrap());
            command.args(["--ignored", "--exact", &name]);
            command.output().unwrap().status
        };
        assert_eq!(end("end_a_child").signal(), Some(SIGUSR2));
        assert_eq!(end("do_not_end_a_child").code(), Some(0));
    }

    fn notice(preemption: Preemption) -> PreemptionNotice {
        let mut notice = PreemptionNotice::default();
        notice.watch(preemption.with_signals([])).unwrap();
        notice
    }

    #[test]
    fn a_deadline_is_given_from_its_moment_on() {
        let hour = Duration::from_secs(3600);
        let at = |deadline| notice(Preemption::new().with_deadline(deadline)).is_given(0);
        assert!(at(SystemTime::now() - hour));
        assert!(!at(SystemTime::now() + hour));
    }

    #[test]
    fn the_earliest_deadline_counts() {
        let mut notice = notice(Preemption::new().with_deadline(SystemTime::UNIX_EPOCH));
        let later = SystemTime::now() + Duration::from_secs(3600);
        let later = Preemption::new().with_signals([]).with_deadline(later);
        notice.watch(later).unwrap();
        assert!(notice.is_given(0));
    }

    #[test]
    fn a_file_is_looked_for_now_and_then_and_a_notice_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("leave");
        let mut notice = notice(Preemption::new().with_file(&path));
        assert!(!notice.is_given(0));
        std::fs::write(&path, "").unwrap();
        assert!(!notice.is_given(0), "it was looked for a moment ago");
        notice.looked_at = Some(Instant::now() - BETWEEN_LOOKS);
        assert!(notice.is_given(0));
        std::fs::remove_file(path).unwrap();
        assert!(notice.is_given(0));
    }

    #[test]
    fn without_anything_to_watch_there_is_no_notice() {
        assert!(!PreemptionNotice::default().is_given(0));
        assert!(!notice(Preemption::new()).is_given(0));
    }
}
