//! What goes over connections: frames between ranks, messages while they meet.

pub(crate) mod frame;
pub(crate) mod message;
mod source;

pub(crate) use source::ReadError;
