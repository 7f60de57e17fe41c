//! The planes of the mesh: the data plane sends chunks as frames and reads while it waits; the control plane sends final
//! messages and takes exit reports. Heartbeats are in `heartbeats.rs`.

use std::{
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use rustix::event::{PollFd, PollFlags};

use super::{
    FINAL_MESSAGES_TIMEOUT, Tcp,
    frame_reader::ReadOutcome,
    link::{Link, WRITER_CHECK_INTERVAL},
    local_heartbeats::LocalHeartbeats,
};
use crate::error::{Certainty, Error, Result};
use crate::liveness::{self, suspended_for};
use crate::shm::ShmPeers;
use crate::socket::await_ready;
use crate::topology::TransportKind;
use crate::transport::{
    ControlPlane, DataPlane, FinalMessage, LeaveKind, MAX_IN_FLIGHT, OpDeadline, OutgoingChunk,
    Poller, Subset,
};
use crate::wire::{FrameKind, Head};

impl DataPlane for Tcp {
    fn kind(&self) -> TransportKind {
        TransportKind::Tcp
    }

    fn send(
        &self,
        to: usize,
        chunk: OutgoingChunk<'_>,
        deadline: &mut OpDeadline,
        poller: Option<&Poller>,
    ) -> Result<()> {
        let (poller, group) = (poller.unwrap_or(&self.poller), chunk.tag.group);
        let Some(link) = self.links.get(to) else {
            return Err(deadline.protocol(&self.peers[self.rank], "it sent a part to itself"));
        };
        let encoded = chunk.fingerprint.map(|fingerprint| fingerprint.encode());
        let preamble = match &encoded {
            Some((bytes, len)) => &bytes[..*len],
            None => &[],
        };
        let head = chunk.head(preamble);
        // After a failure there is little time to complete the frame; then the failure is returned.
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
                    _ => now + WRITER_CHECK_INTERVAL,
                };
                if written > stuck.map_or(0, |(at, _)| at) {
                    deadline.on_progress(now);
                }
                self.inbox.await_rank(group, Some(to));
                let was_calm = self.inbox.has_no_failures();
                if failure.is_none() && (now >= due || !was_calm) {
                    due = now + WRITER_CHECK_INTERVAL;
                    let check = self.inbox.check(to, &self.peers, deadline);
                    let check = check.and_then(|()| {
                        let roots = |deadline: &OpDeadline| self.inbox.roots(vec![to], deadline);
                        let active = |rank| self.last_activity(rank);
                        let last = |rank| self.inbox.last_op(rank);
                        let longest = WRITER_CHECK_INTERVAL;
                        deadline
                            .tick(longest, roots, active, &self.peers, last)
                            .map(drop)
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
                let stop = || was_calm && !self.inbox.has_no_failures();
                self.poll_until_writable(poller, link, due, stop);
                true
            },
        );
        if stuck.is_some() {
            self.inbox.await_rank(group, None);
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

    fn wait_for_arrival(&self, version: u64, due: Instant, poller: Option<&Poller>) {
        self.poll_until_event(poller.unwrap_or(&self.poller), version, due);
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

impl Tcp {
    /// Reads until something happens that was not counted in `version`, or it is `due`.
    pub(super) fn poll_until_event(&self, poller: &Poller, version: u64, due: Instant) {
        let _polling = self.handoff.enter();
        let mut busy = Instant::now() + self.busy;
        loop {
            let outcome = self.links.read_frames();
            if self.inbox.version() != version {
                return;
            }
            let now = Instant::now();
            if now >= due {
                return;
            }
            if outcome == ReadOutcome::Frames {
                busy = now + self.busy;
            }
            if now < busy {
                std::hint::spin_loop();
                continue;
            }
            let Some(waker) = self.inbox.before_poll(poller, version) else {
                return;
            };
            self.links
                .poll([PollFd::new(waker, PollFlags::IN)], due - now);
            self.inbox.after_poll(poller);
        }
    }

    /// Waits until there may be room in a connection, and reads meanwhile; until it is `due` at the
    /// latest, and not where there is reason to `stop`. The peer may be waiting for this rank to
    /// read.
    pub(super) fn poll_until_writable(
        &self,
        poller: &Poller,
        link: &Link,
        due: Instant,
        stop: impl Fn() -> bool,
    ) {
        let _polling = self.handoff.enter();
        while self.links.read_frames() == ReadOutcome::Frames {}
        let version = self.inbox.version();
        if stop() {
            return;
        }
        // Nothing is missed that happens after the look.
        let Some(waker) = self.inbox.before_poll(poller, version) else {
            return;
        };
        let left = due.saturating_duration_since(Instant::now());
        self.links.poll(
            [
                PollFd::new(waker, PollFlags::IN),
                PollFd::new(link.stream(), PollFlags::OUT),
            ],
            left,
        );
        self.inbox.after_poll(poller);
    }

    /// Takes what has come, and what comes until all that was said has left for these peers; for a
    /// while at most. Where bytes are left unread when the program ends, or come later, the system cuts off what
    /// has not arrived, and what has arrived stays.
    pub(super) fn drain_until_sent(&self, receivers: &[&Link], until: Instant) {
        let take =
            || while self.links.read_frames() == ReadOutcome::Frames && Instant::now() < until {};
        take();
        while let Some(link) = receivers.iter().find(|link| link.has_unsent()) {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            // No event tells that all has left.
            await_ready(link.stream(), PollFlags::IN, left.min(SEND_CHECK_INTERVAL));
            take();
        }
        // A peer that ended just now has sent its own final message before.
        take();
    }
}

/// The interval at which to check if the final message has left.
const SEND_CHECK_INTERVAL: Duration = Duration::from_millis(1);

impl ControlPlane for Tcp {
    fn leave(&self, leave: &FinalMessage) {
        self.inbox.close();
        self.handoff.end();
        let (head, preamble) = match leave {
            FinalMessage::Abort(abort) => {
                let preamble = abort.encode();
                let head = Head::new(FrameKind::Abort, abort.sequence, 0, &preamble, &[]);
                (head.in_group(abort.group).encode(), preamble)
            }
            FinalMessage::Goodbye(kind) => (goodbye(*kind).encode(), Vec::new()),
        };
        // Lost ranks get their message last, so that no other rank waits for them.
        let (mut receivers, lost): (Vec<_>, Vec<_>) = self
            .links
            .iter()
            .partition(|(rank, _)| self.inbox.can_receive(*rank));
        // Nor for one that broke the protocol, and may take nothing.
        receivers.sort_by_key(|(rank, _)| !self.inbox.is_present(*rank));
        let patience = match leave {
            // Who is not lost has to get all data, some of which a network may have lost.
            FinalMessage::Goodbye(_) if receivers.iter().any(|(_, link)| !link.is_local) => {
                liveness::DEFAULT_TIMEOUT
            }
            _ => FINAL_MESSAGES_TIMEOUT,
        };
        let until = Instant::now() + patience;
        for (_, link) in &receivers {
            link.part(&head, &preamble, until);
        }
        // A peer that has failed may still listen, and would take a connection that ends without a final message for a
        // death. The time is enough for a heartbeat that another thread is writing, and bounds the wait for a stuck writer.
        let soon = Instant::now() + WRITER_CHECK_INTERVAL;
        for (_, link) in lost {
            link.part(&head, &preamble, soon);
        }
        // The program may end next.
        let receivers: Vec<&Link> = receivers.into_iter().map(|(_, link)| link).collect();
        self.drain_until_sent(&receivers, until);
    }

    fn leave_group(&self, group: &Subset, kind: LeaveKind) {
        let frame = goodbye(kind).in_group(group.id).encode();
        let until = Instant::now() + FINAL_MESSAGES_TIMEOUT;
        for member in group.members.iter() {
            if let Some(link) = self.links.get(*member)
                && self.inbox.is_present(*member)
            {
                link.write_soon(&frame, until);
            }
        }
    }

    fn last_activity(&self, rank: usize) -> Option<Instant> {
        self.inbox.active(rank)
    }

    fn heartbeat(&self, liveness: Duration) -> Option<Duration> {
        let mut due = self.round_due.lock();
        Some(self.heartbeat_round(Instant::now(), &mut due, liveness))
    }

    fn enable_heartbeats(&self, memory: Option<&ShmPeers>) {
        let memory = memory.map(|peers| LocalHeartbeats::new(peers.clone()));
        // This is called once; a second call would have no effect.
        let _ = self.heartbeats.set(memory);
    }

    fn silent(&self, silence: Duration) -> Vec<usize> {
        let now = Instant::now();
        // Callers ask for half the liveness timeout. A process that has just been suspended does not know who is silent; a
        // round that is under way subtracts the time of the suspension.
        let due = self.round_due.try_lock().map(|due| *due);
        if suspended_for(due, now, 2 * silence).is_some() {
            return Vec::new();
        }
        self.read_local_heartbeats();
        self.links
            .iter()
            .filter(|(rank, link)| {
                self.inbox.is_present(*rank)
                    && link.liveness.has_sent_heartbeat()
                    && link.liveness.silence(now) >= silence
                    && !link.has_unread()
            })
            .map(|(rank, _)| rank)
            .collect()
    }

    fn report_exit(&self, rank: usize, text: &str) -> bool {
        if let Some(link) = self.links.get(rank)
            && self.inbox.is_present(rank)
        {
            if link.liveness.is_paused() || link.has_unread() {
                return false;
            }
            self.inbox.lost(rank, text, Certainty::Settled);
        }
        true
    }

    fn inject_disconnect(&self) {
        for (_, link) in self.links.iter() {
            link.cut();
        }
    }
}

/// The message of a rank that leaves.
fn goodbye(kind: LeaveKind) -> Head {
    let code = match kind {
        LeaveKind::Closed => 0,
        LeaveKind::Dropped => 1,
    };
    Head::new(FrameKind::Goodbye, 0, code, &[], &[])
}
