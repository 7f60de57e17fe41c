//! The formats on connections: frames between ranks, and messages while they meet.

pub(crate) mod frame;
pub(crate) mod message;
mod source;
mod wire_error;

pub(crate) use source::ReadError;
pub(crate) use wire_error::{WireError, read_printable, shorten};
