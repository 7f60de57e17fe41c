//! What the state machine asks for, and why a group was ended.

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    /// Send this signal to the process groups of these members.
    Signal {
        /// Its number.
        signal: i32,
        /// The members, of whom some may have ended: they can have left children.
        ranks: Vec<usize>,
    },
    /// Report that these ranks have not ended yet.
    Waiting(Vec<usize>),
}

/// Why a group was ended, when it did not end by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cause {
    /// This rank failed first.
    Failure(usize),
    /// The launcher received this signal.
    Signal(i32),
    /// The launcher's output was closed.
    OutputClosed,
    /// All ranks were preempted: they have saved, and ended with the exit code for it.
    Preempted,
}
