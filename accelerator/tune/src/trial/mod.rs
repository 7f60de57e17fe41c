//! The interfaces that trials implement, and the process that carries them out.

pub use session::{TrialContext, TrialSession};
pub use trainable::{BoxError, Reset, Trainable};
pub(crate) use worker::{serve_function, serve_trainable};

pub(crate) mod protocol;
mod session;
mod trainable;
mod worker;
