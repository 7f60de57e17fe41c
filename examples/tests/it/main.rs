//! What examples share, and what the README shows of them.

mod double;
mod readme;
