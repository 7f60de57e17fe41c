//! What all stages of a test share: its arguments, this program, and signals to end.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use signal_hook::consts::signal::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};

use super::args::{Sabotage, Stage, TestArgs};
use crate::error::{Error, Result};
use crate::text::print;

/// What all stages of a test have in common.
#[derive(Debug)]
pub(super) struct Context {
    pub(super) interrupt: Interrupt,
    pub(super) program: PathBuf,
    pub(super) arguments: TestArgs,
}

impl Context {
    /// How the first rank of this stage is to fail.
    pub(super) fn sabotage(&self, stage: Stage) -> Option<Sabotage> {
        let (broken, sabotage) = self.arguments.r#break?;
        (broken == stage).then_some(sabotage)
    }

    /// Prints a line of the report, unless that is JSON.
    pub(super) fn show(&self, line: &str) -> Result<()> {
        if !self.arguments.json {
            print(line)?;
        }
        Ok(())
    }
}

/// Whether a signal asked the test to end. It ends then as it always does, and leaves nothing.
#[derive(Clone, Debug)]
pub(super) struct Interrupt(Arc<AtomicUsize>);

impl Interrupt {
    /// Notes signals from now on.
    ///
    /// # Errors
    /// When the handlers cannot be installed.
    pub(super) fn listen() -> Result<Self> {
        let received = Arc::new(AtomicUsize::new(0));
        for signal in [SIGINT, SIGTERM, SIGHUP, SIGQUIT] {
            signal_hook::flag::register_usize(signal, Arc::clone(&received), signal as usize)
                .map_err(|error| {
                    Error::system("the signal handlers could not be installed").with_source(error)
                })?;
        }
        Ok(Self(received))
    }

    /// The last signal that was received.
    pub(super) fn signal(&self) -> Option<i32> {
        match self.0.load(Ordering::Acquire) {
            0 => None,
            signal => i32::try_from(signal).ok(),
        }
    }
}
