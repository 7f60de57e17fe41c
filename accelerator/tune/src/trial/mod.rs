//! The interfaces that trials implement, and the process that carries them out.

pub use session::{BoxError, TrialContext, TrialSession};
pub use trainable::{Reset, Trainable};
pub(crate) use worker::{serve_function, serve_trainable};

pub(crate) mod protocol;
mod session;
mod trainable;
mod worker;
