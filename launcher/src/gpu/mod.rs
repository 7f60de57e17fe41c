//! GPUs: what one is called, which there are, and which of them a program sees.

pub(crate) mod id;
pub(crate) mod inventory;
pub(crate) mod visible;
