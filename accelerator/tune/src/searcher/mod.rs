//! Search algorithms, which suggest configurations.

use serde_json::Value;

use crate::config::{Config, TrialId};
use crate::error::Result;

pub use optuna::Optuna;
pub(crate) use variants::VariantGenerator;

mod optuna;
mod variants;

/// Suggests the configurations that trials try: an ask-and-tell interface.
///
/// A search journals every reply. Where it is resumed, the searcher is made anew and the calls are repeated in their order,
/// so a searcher is deterministic: the same calls get the same replies.
pub trait Searcher: Send {
    /// Suggests the configuration of the next trial; `None` if nothing is left to try.
    ///
    /// # Errors
    /// If it cannot say, as one that lives in another process which has ended. That ends the search.
    fn ask(&mut self, trial: TrialId) -> Result<Option<Config>>;

    /// A trial has reported a value of the objective, which may be NaN, and continues.
    ///
    /// # Errors
    /// See [`ask`](Self::ask).
    fn report(&mut self, _trial: TrialId, _iteration: u64, _value: f64) -> Result<()> {
        Ok(())
    }

    /// A trial has ended.
    ///
    /// # Errors
    /// See [`ask`](Self::ask).
    fn tell(&mut self, _trial: TrialId, _end: TrialEnd) -> Result<()> {
        Ok(())
    }

    /// Returns `true` if suggestions depend on what trials reported. Otherwise it is asked ahead of time.
    fn is_adaptive(&self) -> bool {
        true
    }

    /// Returns its kind and settings as JSON: a search that is resumed has to be given the same. The default is the
    /// name of the type.
    fn config(&self) -> Value {
        std::any::type_name::<Self>().into()
    }

    /// Returns its version, such as `Optuna 5.0.0`, if another version may suggest otherwise. A search that cannot be
    /// resumed with this one names the one that it began with.
    fn version(&self) -> Option<String> {
        None
    }
}

/// The end of a trial, as its searcher learns of it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum TrialEnd {
    /// It ran to its end, with this last value of the objective.
    Completed(f64),
    /// A scheduler stopped it early, with this last value.
    Stopped(f64),
    /// It failed, or never reported a number.
    Failed,
}
