//! One launcher per host: that of host 0, the head, has the others start ranks. `README.md` beside this file explains
//! the design.

mod admission;
mod handshake;
pub(crate) mod head;
mod host;
mod line;
pub(crate) mod node;
pub(crate) mod ssh;
mod stream_line;
