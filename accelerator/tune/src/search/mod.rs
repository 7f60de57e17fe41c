//! Carrying a search out.

mod decisions;
mod driver;
