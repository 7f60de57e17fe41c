//! A round of heartbeats: sends them, and finds silent peers.

use std::time::{Duration, Instant};

use super::{Tcp, link::Link};
use crate::{
    error::{Certainty, Seconds},
    liveness::{mesh_interval, suspended_for},
    wire::frame::{FrameKind, Head, Heartbeat},
};

impl Tcp {
    /// Runs one round: a heartbeat on every idle link, then a check of every silent one.
    ///
    /// A process that was suspended receives nothing meanwhile. A round that comes later than it was `due` does not
    /// count that time, and after more than a whole period finds nobody silent before another one has passed; and
    /// nobody is silent whose bytes wait to be read.
    pub(super) fn round(&self, due: &mut Option<Instant>, liveness: Duration) -> Duration {
        self.inbox.note_running(liveness);
        let now = Instant::now();
        if let Some(late) = suspended_for(*due, now, liveness) {
            self.credit_silence(match late < liveness {
                true => late,
                false => liveness.saturating_add(late),
            });
        }
        let milliseconds = liveness.as_millis().try_into().unwrap_or(u32::MAX);
        let heartbeat = Heartbeat {
            awaited: self.inbox.awaited(),
            active: self.inbox.activity().last().map(|at| at.elapsed()),
        };
        let heartbeat = heartbeat.encode();
        let frame = Head::new(FrameKind::Heartbeat, heartbeat, milliseconds, &[], &[]).encode();
        let mut tick = mesh_interval(liveness);
        for (_, link) in self.present() {
            link.heartbeat(&frame);
            tick = link
                .liveness
                .peer_limit()
                .map_or(tick, |wish| tick.min(mesh_interval(wish)));
        }
        let mut next = tick;
        for (rank, link) in self.present() {
            let limit = match link.liveness.has_spoken() {
                true => liveness,
                // It may be waiting for others to connect to it, and shows no life meanwhile.
                false => liveness.saturating_add(self.connect_timeout),
            };
            let silence = link.liveness.silence(now);
            if silence < limit {
                next = next.min((limit - silence).max(MIN_PAUSE));
                continue;
            }
            next = next.min(MIN_PAUSE);
            // The socket is checked before the clock, so that a suspension in between blames no peer.
            if link.has_unread() {
                continue;
            }
            if let Some(late) = suspended_for(Some(now), Instant::now(), liveness) {
                self.credit_silence(liveness.saturating_add(late));
                break;
            }
            let cause = format!(
                "it has been silent for {:.1} s: stopped, swapped out, or cut off from the network",
                silence.as_secs_f64()
            );
            tracing::debug!(
                rank = self.rank,
                "rank {rank} was silent for {}",
                Seconds(silence)
            );
            self.inbox.lost(rank, cause, Certainty::Settled);
        }
        *due = Some(Instant::now() + next);
        next
    }

    /// Takes so much silence off every peer.
    fn credit_silence(&self, silence: Duration) {
        let now = Instant::now();
        for (_, link) in self.others() {
            link.liveness.credit(silence, now);
        }
    }

    fn present(&self) -> impl Iterator<Item = (usize, &Link)> {
        self.others()
            .filter(|(rank, _)| self.inbox.is_present(*rank))
    }
}

const MIN_PAUSE: Duration = Duration::from_millis(20);
