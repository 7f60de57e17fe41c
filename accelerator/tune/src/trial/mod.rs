//! The interfaces that trials implement, and the process that carries them out.

pub use session::{BoxError, Reset, Trainable, TrialContext, TrialSession};
pub(crate) use worker::{serve_function, serve_trainable};

pub(crate) mod protocol;
mod session;
mod worker;
