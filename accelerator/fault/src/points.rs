//! The places where a planned fault happens.

use crate::plan::{Error, Point};

/// The part of a fault that the caller carries out.
///
/// ```
/// use accelerator_fault::{Effect, Point, SaveStage, fail_point};
/// use std::io::{Error, ErrorKind};
///
/// /// Where a checkpoint is written.
/// fn failed_write(rank: usize, number: u64) -> Result<(), Error> {
///     match fail_point(rank, Point::Save(number, SaveStage::Data)) {
///         Some(Effect::DiskFull) => Err(ErrorKind::StorageFull.into()),
///         Some(Effect::FailWrite) => Err(Error::other("a fault that was planned")),
///         // No connection is involved here.
///         Some(Effect::DropConnection | Effect::CorruptFrame) | None => Ok(()),
///     }
/// }
/// assert!(failed_write(0, 1).is_ok(), "nothing is planned");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Cut all connections of the rank.
    DropConnection,
    /// Corrupt the next frame.
    CorruptFrame,
    /// Fail the next write as a full disk does.
    DiskFull,
    /// Fail the next write.
    FailWrite,
}

/// Triggers the fault that is planned for this rank at this point.
///
/// Faults of the whole process (kill, exit, panic, stop, slow) happen inside; others are returned
/// for the caller to carry out. Each fault is triggered once. Without the feature `inject` this does
/// nothing.
#[inline]
pub fn fail_point(rank: usize, point: Point) -> Option<Effect> {
    #[cfg(feature = "inject")]
    return inject::fail_point(rank, point);
    #[cfg(not(feature = "inject"))]
    {
        let _ = (rank, point);
        None
    }
}

/// Checks that the plan of the environment can be carried out.
///
/// # Errors
///
/// If the plan cannot be read, or is set for a program that is built without injection.
pub fn check() -> Result<(), Error> {
    match std::env::var(crate::VARIABLE) {
        Err(std::env::VarError::NotPresent) => Ok(()),
        Err(error) => Err(Error(format!("{}: {error}", crate::VARIABLE))),
        // Set to nothing is not set, for the other variables of the project too.
        Ok(text) if text.is_empty() => Ok(()),
        Ok(text) => {
            let plan: crate::FaultPlan = text.parse()?;
            if plan.faults.is_empty() || cfg!(feature = "inject") {
                return Ok(());
            }
            Err(Error(format!(
                "{} is set, but this program is built without fault injection; build it with the \
                 feature `faults`, or unset the variable",
                crate::VARIABLE
            )))
        }
    }
}

#[cfg(feature = "inject")]
mod inject {
    use std::process::Command;
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    use rustix::process::{Signal, getpid, kill_process};

    use super::Effect;
    use crate::plan::{Action, Fault, FaultPlan, Point};

    pub(super) fn fail_point(rank: usize, point: Point) -> Option<Effect> {
        let planned = planned_faults().iter().find(|planned| {
            planned.fault.rank == rank
                && planned.fault.point == point
                && !planned.triggered.swap(true, Ordering::AcqRel)
        })?;
        let fault = &planned.fault;
        match fault.action {
            Action::Kill => die(Signal::KILL),
            Action::Segv => die(Signal::SEGV),
            Action::Exit(code) => std::process::exit(code),
            Action::Panic => panic!("injected fault: {fault}"),
            Action::Stop(time) => stop(time),
            Action::Slow(time) => std::thread::sleep(time),
            Action::DropConnection => return Some(Effect::DropConnection),
            Action::CorruptFrame => return Some(Effect::CorruptFrame),
            Action::DiskFull => return Some(Effect::DiskFull),
            Action::FailWrite => return Some(Effect::FailWrite),
        }
        None
    }

    struct PlannedFault {
        fault: Fault,
        triggered: AtomicBool,
    }

    /// The faults of this attempt of the job.
    fn planned_faults() -> &'static [PlannedFault] {
        static PLANNED: OnceLock<Vec<PlannedFault>> = OnceLock::new();
        PLANNED.get_or_init(|| {
            let read = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
            let restart = read(crate::RESTART)
                .and_then(|x| x.parse().ok())
                .unwrap_or(0);
            // A plan that cannot be read is refused by `check`.
            let plan: FaultPlan = read(crate::VARIABLE)
                .and_then(|text| text.parse().ok())
                .unwrap_or_default();
            let faults = plan.faults.into_iter().filter(|x| x.restart == restart);
            faults
                .map(|fault| PlannedFault {
                    fault,
                    triggered: AtomicBool::new(false),
                })
                .collect()
        })
    }

    fn die(signal: Signal) {
        // The standard library has a handler for SIGSEGV, because of stack overflows. Where it is
        // none, the handler restores the default and returns, expecting the fault to happen again:
        // so it is the second signal that ends the process.
        for _ in 0..20 {
            let _ = kill_process(getpid(), signal);
            std::thread::sleep(Duration::from_millis(50));
        }
        loop {
            let _ = kill_process(getpid(), Signal::KILL);
            std::thread::sleep(Duration::from_secs(1));
        }
    }

    /// Stops the process, and lets a shell wake it again after a time.
    fn stop(time: Option<Duration>) {
        if let Some(time) = time {
            let script = format!(
                "sleep {}; kill -CONT {}",
                time.as_secs_f64(),
                getpid().as_raw_pid()
            );
            if Command::new("sh").args(["-c", &script]).spawn().is_err() {
                return;
            }
        }
        let _ = kill_process(getpid(), Signal::STOP);
        // Another thread may take the signal; this one is stopped a little later.
        std::thread::sleep(Duration::from_millis(20));
    }
}
