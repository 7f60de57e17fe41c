//! Operations that run beside the program.

use std::{
    fmt,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
};

use crate::{
    buffer::Buffer,
    error::{Error, Kind, Result},
};

/// An all-reduce that was started and gives its buffer back when it is done.
///
/// Dropping it does not stop the operation, since the other ranks count on it; the buffer and
/// any error are then lost, though a failed group says so at the next operation.
#[must_use = "the result and any error of the operation come from wait()"]
pub struct Pending(Arc<Shared>);

impl Pending {
    /// Waits until the operation is done and gives the reduced buffer back.
    ///
    /// Operations may be waited for in any order.
    ///
    /// # Errors
    ///
    /// The error of the operation, as of the blocking one.
    pub fn wait(self) -> Result<Buffer> {
        let outcome = self.0.outcome.lock();
        // The outcome is replaced as a whole.
        let outcome = outcome.unwrap_or_else(PoisonError::into_inner);
        let waited = self
            .0
            .done
            .wait_while(outcome, |outcome| matches!(outcome, Outcome::Running));
        let mut outcome = waited.unwrap_or_else(PoisonError::into_inner);
        match std::mem::replace(&mut *outcome, Outcome::Running) {
            Outcome::Done(result) => result,
            // `wait_while` returned, so it is not running; only this method takes the result.
            Outcome::Running => Err(interrupted()),
        }
    }

    /// Whether [`wait`](Self::wait) would return at once.
    pub fn is_ready(&self) -> bool {
        !matches!(*self.0.lock(), Outcome::Running)
    }

    /// The two ends of one operation.
    pub(crate) fn new() -> (Self, Completion) {
        let shared = Arc::new(Shared {
            outcome: Mutex::new(Outcome::Running),
            done: Condvar::new(),
        });
        (Self(Arc::clone(&shared)), Completion(shared))
    }
}

impl fmt::Debug for Pending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pending")
            .field("ready", &self.is_ready())
            .finish()
    }
}

/// The end of an operation that knows the result. Dropped without one, it reports an error, so
/// that nobody waits for ever.
#[derive(Debug)]
pub(crate) struct Completion(Arc<Shared>);

impl Completion {
    pub(crate) fn complete(self, result: Result<Buffer>) {
        *self.0.lock() = Outcome::Done(result);
    }
}

impl Drop for Completion {
    fn drop(&mut self) {
        let mut outcome = self.0.lock();
        if matches!(*outcome, Outcome::Running) {
            *outcome = Outcome::Done(Err(interrupted()));
        }
        drop(outcome);
        self.0.done.notify_all();
    }
}

#[derive(Debug)]
struct Shared {
    outcome: Mutex<Outcome>,
    done: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Outcome> {
        // The outcome is replaced as a whole.
        self.outcome.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Debug)]
enum Outcome {
    Done(Result<Buffer>),
    Running,
}

fn interrupted() -> Error {
    Error::new(
        Kind::Closed,
        "the operation was given up before it ran; the group's communication thread is gone",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::DType;

    #[test]
    fn a_result_is_handed_over() {
        let (pending, completion) = Pending::new();
        assert!(!pending.is_ready());
        completion.complete(Ok(Buffer::zeroed(DType::F32, 3)));
        assert!(pending.is_ready());
        assert_eq!(pending.wait().unwrap().len(), 3);
    }

    #[test]
    fn nobody_waits_for_an_operation_that_is_gone() {
        let (pending, completion) = Pending::new();
        drop(completion);
        assert!(pending.wait().unwrap_err().is_closed());
    }
}
