//! One suite of cases over every transport, at 1, 2, 3, 4 and 7 ranks.

#![allow(
    clippy::unwrap_used,
    reason = "a test fails where its preparation does"
)]

#[macro_use]
mod suite;

transport!(tcp, Means::Tcp);
transport!(threads, Means::Threads);

/// More ranks than a usual host has cores.
mod many {
    use super::suite::{cases, world::Means};

    #[test]
    fn threads() {
        cases::barriers(Means::Threads, 64);
        cases::orderly_ends(Means::Threads, 64);
    }

    #[test]
    fn processes() {
        cases::barriers(Means::Tcp, 12);
    }
}
