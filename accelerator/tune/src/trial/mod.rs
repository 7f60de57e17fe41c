//! What trials are written against, and the process that carries them out.

pub use id::TrialId;
pub use session::{TrialContext, TrialSession};
pub use trainable::{BoxError, Reset, Trainable};
pub(crate) use worker::{serve_function, serve_trainable};

mod id;
pub(crate) mod protocol;
mod session;
mod trainable;
mod worker;
