//! Tests of ranks together, one module per subject.

#![allow(
    clippy::expect_used,
    clippy::unwrap_used,
    reason = "these are tests, helpers included"
)]

#[macro_use]
mod suite;

mod collectives;
#[path = "../../../../tests/src/copies.rs"]
mod copies;
#[cfg(target_os = "linux")]
mod exchange;
#[cfg(target_os = "linux")]
mod failures;
#[cfg(all(feature = "faults", target_os = "linux"))]
mod faults;
mod flight_records;
mod groups;
mod intruders;
#[cfg(unix)]
mod meeting;
#[cfg(target_os = "linux")]
mod netns;
#[cfg(target_os = "linux")]
mod networks;
mod oracle;
#[path = "../../../../tests/src/ports.rs"]
mod ports;
#[cfg(target_os = "linux")]
mod processes;
mod rendezvous;
mod stderr_fallback;
mod warnings;
