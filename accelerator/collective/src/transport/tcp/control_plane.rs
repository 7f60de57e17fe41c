//! The control plane of the mesh: final messages, heartbeats and exit reports.

use std::time::{Duration, Instant};

use super::{
    FINAL_MESSAGES_TIMEOUT, Tcp,
    link::{Link, WRITER_CHECK_INTERVAL},
};
use crate::{
    error::Certainty,
    liveness,
    transport::{ControlPlane, FinalMessage, LeaveKind},
    wire::frame::{FrameKind, Head},
};

impl ControlPlane for Tcp {
    fn leave(&self, leave: &FinalMessage) {
        self.inbox.close();
        self.handoff.end();
        let (head, preamble) = match leave {
            FinalMessage::Abort(abort) => {
                let preamble = abort.encode();
                let head = Head::new(FrameKind::Abort, abort.sequence, 0, &preamble, &[]);
                (head.encode(), preamble)
            }
            FinalMessage::Goodbye(kind) => {
                let code = match kind {
                    LeaveKind::Closed => 0,
                    LeaveKind::Dropped => 1,
                };
                let head = Head::new(FrameKind::Goodbye, 0, code, &[], &[]);
                (head.encode(), Vec::new())
            }
        };
        // Who is lost is told last, so that nobody else waits for it.
        let (mut receivers, lost): (Vec<_>, Vec<_>) = self
            .others()
            .partition(|(rank, _)| self.inbox.can_receive(*rank));
        // Nor for one that broke the protocol, and may take nothing.
        receivers.sort_by_key(|(rank, _)| !self.inbox.is_present(*rank));
        let patience = match leave {
            // Who is not lost has to get all data, some of which a network may have lost.
            FinalMessage::Goodbye(_) if receivers.iter().any(|(_, link)| !link.is_local()) => {
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

    fn last_activity(&self, rank: usize) -> Option<Instant> {
        self.inbox.active(rank)
    }

    fn heartbeat(&self, liveness: Duration) -> Option<Duration> {
        let mut due = self.round_due.lock();
        Some(self.round(&mut due, liveness))
    }

    fn silent(&self, silence: Duration) -> Vec<usize> {
        let now = Instant::now();
        self.others()
            .filter(|(rank, link)| {
                self.inbox.is_present(*rank)
                    && link.liveness.has_spoken()
                    && link.liveness.silence(now) >= silence
                    && !link.has_unread()
            })
            .map(|(rank, _)| rank)
            .collect()
    }

    fn report_exit(&self, rank: usize, text: &str) -> bool {
        if let Some(link) = &self.links[rank]
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
        for (_, link) in self.others() {
            link.cut();
        }
    }
}
