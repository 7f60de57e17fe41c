//! The policy of liveness: how often heartbeats are sent, how long a peer may be silent, and when this process takes
//! itself for suspended.
//!
//! Three loops follow this policy and use it to detect that they were suspended: the heartbeats of the mesh
//! (`transport/tcp/heartbeats.rs`), a rank's connection to the store (`rendezvous/store_client.rs`), and the clock of
//! the store (`rendezvous/store_state/clock.rs`). The clock of an operation (`transport/deadline.rs`) finds it by
//! [`SUSPEND_THRESHOLD`].

use std::time::{Duration, Instant};

/// The interval at which a rank and the store send each other a heartbeat while the ranks meet: a quarter of the
/// liveness timeout, and at most 250 ms.
pub(crate) fn store_interval(timeout: Duration) -> Duration {
    (timeout / 4).min(Duration::from_millis(250))
}

/// The interval between heartbeat rounds of a rank that sends heartbeats over this many `connections`: a sixteenth of the
/// liveness timeout, within 25 to 250 ms. A connection that carried nothing since the last round gets a heartbeat, so its
/// last byte is at most two rounds old.
///
/// With the default timeout of 5 s, a link that is down for 3 s must not be silent for 5 s: the last byte before the
/// outage may be two rounds old, and TCP may take another second to retransmit.
///
/// With many connections, the interval grows to 2 ms per connection, which keeps a rank at 500 heartbeats per second. It
/// never exceeds a twelfth of the timeout, to leave room for such an outage.
pub(crate) fn mesh_interval(timeout: Duration, connections: usize) -> Duration {
    let base = (timeout / 16).clamp(Duration::from_millis(25), Duration::from_millis(250));
    let scaled = Duration::from_millis(2 * connections as u64).min(timeout / 12);
    base.max(scaled)
}

/// The silence after which a peer is suspected when the group fails: half the liveness timeout.
pub(crate) fn suspect_after(timeout: Duration) -> Duration {
    timeout / 2
}

/// The delay of a loop that wanted to run when it was `due`, if it is so long that the process was suspended: stopped,
/// or kept from running. The loop then blames no peer for the silence of that time.
pub(crate) fn suspended_for(
    due: Option<Instant>,
    now: Instant,
    timeout: Duration,
) -> Option<Duration> {
    let late = now.saturating_duration_since(due?);
    (late > timeout / 4).then_some(late)
}

pub(crate) fn bounded(timeout: Duration) -> Duration {
    timeout.clamp(MIN_TIMEOUT, MAX_TIMEOUT)
}

/// The liveness timeout where neither the program nor the launch sets one.
pub(crate) use accelerator_host::DEFAULT_LIVENESS as DEFAULT_TIMEOUT;

/// The shortest timeout: with less, the scheduler would decide which ranks are lost. The grammar of
/// `ACCEL_LIVENESS_TIMEOUT` has the same bound.
pub(crate) use accelerator_host::SHORTEST_LIVENESS as MIN_TIMEOUT;

pub(crate) const MAX_TIMEOUT: Duration = Duration::from_secs(24 * 3600);

/// A thread of an operation that wakes so much later than it asked for was kept from running.
pub(crate) const SUSPEND_THRESHOLD: Duration = Duration::from_millis(250);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outage_of_three_seconds_is_survived_with_any_number_of_connections() {
        for connections in [1, 125, 250, 1024, 1 << 20] {
            let last_byte = 2 * mesh_interval(DEFAULT_TIMEOUT, connections);
            let silence = last_byte + Duration::from_millis(3000 + 1000 + 100);
            assert!(
                silence < DEFAULT_TIMEOUT,
                "{connections} connections: {silence:?}"
            );
        }
    }
}
