//! The policy of liveness: how often heartbeats are sent, how long a peer may be silent, and when this process takes itself
//! for suspended.
//!
//! Three loops follow it: the heartbeats of the mesh (`transport/tcp/heartbeat_round.rs`), a rank's connection to the store
//! (`rendezvous/store_client.rs`), and the clock of the store (`rendezvous/store_state/clock.rs`).

use std::time::Duration;

/// How often a rank and the store send each other a heartbeat while the ranks meet: four times in a liveness timeout, and
/// four times a second at least.
pub(crate) fn store_interval(timeout: Duration) -> Duration {
    (timeout / 4).min(Duration::from_millis(250))
}

/// How often the mesh looks for silent peers. An idle connection carries a heartbeat four times in a liveness timeout, at
/// most twenty times and at least once a second.
pub(crate) fn mesh_interval(timeout: Duration) -> Duration {
    (timeout / 4).clamp(Duration::from_millis(50), Duration::from_secs(1)) / 2
}

/// How late a loop may run before it takes the process for suspended: stopped, or kept from running. It then blames no
/// peer for the silence of that time.
pub(crate) fn suspend_tolerance(timeout: Duration) -> Duration {
    timeout / 4
}

/// A timeout within reason.
pub(crate) fn bounded(timeout: Duration) -> Duration {
    timeout.clamp(MIN_TIMEOUT, MAX_TIMEOUT)
}

/// With a shorter timeout the scheduler would decide which ranks are lost.
pub(crate) const MIN_TIMEOUT: Duration = Duration::from_millis(100);

pub(crate) const MAX_TIMEOUT: Duration = Duration::from_secs(24 * 3600);
