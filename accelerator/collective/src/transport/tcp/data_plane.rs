//! The data plane of the mesh: chunks as frames of the connections.

use std::time::{Duration, Instant};

use super::{FINAL_MESSAGES_TIMEOUT, Tcp, link};
use crate::{
    error::{Certainty, Error, Result},
    transport::{ControlPlane, DataPlane, MAX_IN_FLIGHT, OpDeadline, OutgoingChunk, TransportKind},
    wire::frame::Head,
};
use std::sync::atomic::Ordering;

impl DataPlane for Tcp {
    fn kind(&self) -> TransportKind {
        TransportKind::Tcp
    }

    fn send(&self, to: usize, chunk: OutgoingChunk<'_>, deadline: &mut OpDeadline) -> Result<()> {
        let Some(link) = &self.links[to] else {
            return Err(deadline.protocol(&self.peers[self.rank], "it sent a part to itself"));
        };
        let encoded = chunk.fingerprint.map(|fingerprint| fingerprint.encode());
        let preamble = match &encoded {
            Some((bytes, len)) => &bytes[..*len],
            None => &[],
        };
        let head = chunk.head(preamble);
        // After a failure the time to complete the frame is short; the failure is told then.
        let mut failure: Option<(Error, Instant)> = None;
        let mut stuck: Option<(usize, Instant)> = None;
        let outcome = link.write(
            &self.header_bytes(head),
            preamble,
            chunk.payload,
            |written| {
                let now = Instant::now();
                let mut due = match stuck {
                    Some((at, due)) if at == written => due,
                    _ => now + link::WRITER_CHECK_INTERVAL,
                };
                if written > stuck.map_or(0, |(at, _)| at) {
                    deadline.on_progress(now);
                }
                self.inbox.await_rank(Some(to));
                let was_calm = self.inbox.has_no_failures();
                if failure.is_none() && (now >= due || !was_calm) {
                    deadline.compensate(due, now);
                    due = now + link::WRITER_CHECK_INTERVAL;
                    let check = self.inbox.check(to, &self.peers, deadline);
                    let check = check.and_then(|()| {
                        let roots = |deadline: &OpDeadline| self.inbox.roots(vec![to], deadline);
                        let active = |rank| self.last_activity(rank);
                        let last = |rank| self.inbox.last_op(rank);
                        deadline.tick(roots, active, &self.peers, last).map(drop)
                    });
                    if let Err(error) = check {
                        // Who is lost takes nothing more.
                        let linger = match error.is_peer_lost() && error.ranks().contains(&to) {
                            true => Duration::ZERO,
                            false => FINAL_MESSAGES_TIMEOUT,
                        };
                        failure = Some((error, now + linger));
                    }
                }
                stuck = Some((written, due));
                if let Some((_, until)) = &failure {
                    if written == 0 || now >= *until {
                        return false;
                    }
                    due = *until;
                }
                // What has been told is not told again.
                self.poll_until_writable(link, due, || was_calm && !self.inbox.has_no_failures());
                true
            },
        );
        if stuck.is_some() {
            self.inbox.await_rank(None);
        }
        match (failure, outcome) {
            (Some((error, _)), _) => Err(error),
            (None, Ok(())) => {
                deadline.restart();
                Ok(())
            }
            (None, Err(error)) => {
                // The peer, or another one, has said why; else the broken connection is why.
                self.inbox.wait_for_cause(to, &self.peers, deadline)?;
                let why = format!("its connection broke: {error}");
                Err(deadline.lost(&self.peers[to], &why, Certainty::Guessed))
            }
        }
    }

    fn wait_for_arrival(&self, version: u64, due: Instant) {
        self.poll_until_event(version, due);
    }

    fn max_in_flight(&self) -> usize {
        MAX_IN_FLIGHT
    }

    fn inject_corruption(&self) {
        self.corrupt_next.store(true, Ordering::Relaxed);
    }
}

impl Tcp {
    /// The header of a chunk as bytes; one of them is wrong where a fault asks for it.
    fn header_bytes(&self, head: Head) -> [u8; Head::LEN] {
        let mut bytes = head.encode();
        if self.corrupt_next.load(Ordering::Relaxed)
            && self.corrupt_next.swap(false, Ordering::Relaxed)
        {
            bytes[8] ^= 1;
        }
        bytes
    }
}
