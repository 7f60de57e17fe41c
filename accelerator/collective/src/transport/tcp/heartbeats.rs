//! Sends and reads heartbeats, as frames of the mesh or through the memory that ranks of a host share, and detects
//! silent peers.

use std::time::{Duration, Instant};

use super::Tcp;
use super::link::Link;
use crate::error::{Certainty, Seconds};
use crate::liveness::{mesh_interval, suspended_for};
use crate::shm::HeartbeatWords;
use crate::wire::{FrameKind, Head, Heartbeat};

impl Tcp {
    /// Runs one heartbeat round, which begins at `now`: sends heartbeats, then checks every peer for silence. Returns
    /// the pause until the next round.
    ///
    /// A suspended process receives nothing. If the round starts later than it was `due` because of that, the delay
    /// does not count as silence; if the delay reaches the liveness timeout, every peer also gets a whole new timeout.
    /// A peer whose bytes wait to be read is not silent.
    pub(super) fn heartbeat_round(
        &self,
        now: Instant,
        due: &mut Instant,
        liveness: Duration,
    ) -> Duration {
        self.inbox.note_running(liveness);
        if let Some(late) = suspended_for(Some(*due), now, liveness) {
            self.credit_silence(match late < liveness {
                true => late,
                false => liveness.saturating_add(late),
            });
        }
        self.send_heartbeats(liveness);
        self.read_local_heartbeats();
        let mut next = self.heartbeat_interval(liveness);
        for (rank, link) in self.present() {
            let limit = match link.liveness.has_sent_heartbeat() {
                true => liveness,
                // It may still be connecting or negotiating the data path, and sends no heartbeats until then.
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
        // This counts from the start of the round, so a suspension within the round makes the next one late.
        *due = now + next;
        next
    }

    /// Writes deferred frames and, if heartbeats are
    /// [enabled](crate::transport::ControlPlane::enable_heartbeats), sends one: through memory to the ranks that share
    /// it, and on every other link that carried nothing since the last round.
    fn send_heartbeats(&self, liveness: Duration) {
        for (_, link) in self.present() {
            link.write_deferred();
        }
        let Some(local) = self.heartbeats.get() else {
            return;
        };
        let heartbeat = Heartbeat {
            awaited: self.inbox.awaited(),
            active: self.inbox.activity().last().map(|at| at.elapsed()),
        };
        let words = HeartbeatWords {
            content: heartbeat.encode(),
            timeout_ms: liveness.as_millis().try_into().unwrap_or(u32::MAX),
        };
        if let Some(local) = local {
            local.publish(words);
        }
        let (content, timeout_ms) = (words.content, words.timeout_ms);
        let frame = Head::new(FrameKind::Heartbeat, content, timeout_ms, &[], &[]).encode();
        for link in self.links_with_heartbeats() {
            link.heartbeat(&frame);
        }
    }

    /// Reads and records new heartbeats of the ranks that share memory with this one.
    pub(super) fn read_local_heartbeats(&self) {
        let Some(Some(local)) = self.heartbeats.get() else {
            return;
        };
        local.read_new(|rank, words, as_of| {
            if let Some(link) = self.links.get(rank) {
                let timeout = Duration::from_millis(words.timeout_ms.into());
                link.liveness.on_heartbeat(timeout);
                let heartbeat = Heartbeat::decode(words.content);
                self.inbox.on_heartbeat(rank, heartbeat, as_of);
            }
        });
    }

    /// Returns the interval between rounds, which is short enough for the liveness timeouts of all ranks.
    fn heartbeat_interval(&self, liveness: Duration) -> Duration {
        let connections = self.links_with_heartbeats().count();
        let timeouts = self
            .present()
            .filter_map(|(_, link)| link.liveness.peer_timeout());
        mesh_interval(timeouts.fold(liveness, Duration::min), connections)
    }

    /// The links to the peers that do not share memory with this rank.
    fn links_with_heartbeats(&self) -> impl Iterator<Item = &Link> {
        let local = self.heartbeats.get().and_then(Option::as_ref);
        let shares_memory = move |rank| local.is_some_and(|local| local.includes(rank));
        let links = self.present();
        links.filter_map(move |(rank, link)| (!shares_memory(rank)).then_some(link))
    }

    /// Subtracts `silence` from the silence of every peer.
    fn credit_silence(&self, silence: Duration) {
        let now = Instant::now();
        for (_, link) in self.links.iter() {
            link.liveness.credit(silence, now);
        }
    }

    fn present(&self) -> impl Iterator<Item = (usize, &Link)> {
        self.links
            .iter()
            .filter(|(rank, _)| self.inbox.is_present(*rank))
    }
}

const MIN_PAUSE: Duration = Duration::from_millis(20);
