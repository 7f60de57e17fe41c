//! Searches with real processes: the example `quadratic`, started, killed and resumed.

mod faults;
mod kills;
mod support;
mod trials;
