//! The markers by which one trait covers every Burn module and other types, too: of
//! [`Prepare`](crate::Prepare), [`Save`](crate::checkpoint::Save) and [`Resume`](crate::checkpoint::Resume).
//! Programs never name them; the compiler infers which one applies.

/// A Burn module.
#[derive(Debug)]
pub enum Model {}

/// A kind that nothing has.
#[derive(Debug)]
pub enum Never {}

/// Anything that is not a Burn module: an optimizer, a loader, a value of the program's own.
#[derive(Debug)]
pub enum Part {}
