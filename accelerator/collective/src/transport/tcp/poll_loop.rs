//! The waits of operations, which read the connections meanwhile.

use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};

use super::{
    Tcp,
    frame_reader::{ReadOutcome, is_open, read_frames},
    link::{Link, await_ready, timespec},
};

impl Tcp {
    /// Reads until something happens that was not counted in `version`, or it is `due`.
    pub(super) fn poll_until_event(&self, version: u64, due: Instant) {
        let _polling = self.handoff.enter();
        let mut busy = Instant::now() + self.busy;
        loop {
            let outcome = self.read_frames();
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
            let Some(waker) = self.inbox.before_poll(version) else {
                return;
            };
            self.poll([PollFd::new(waker, PollFlags::IN)], due - now);
            self.inbox.after_poll();
        }
    }

    /// Waits until there may be room in a connection, and reads meanwhile; until it is `due` at the
    /// latest, and not where there is reason to `stop`. The peer may be waiting for this rank to
    /// read.
    pub(super) fn poll_until_writable(&self, link: &Link, due: Instant, stop: impl Fn() -> bool) {
        let _polling = self.handoff.enter();
        while self.read_frames() == ReadOutcome::Frames {}
        let version = self.inbox.version();
        if stop() {
            return;
        }
        // Nothing is missed that happens after the look.
        let Some(waker) = self.inbox.before_poll(version) else {
            return;
        };
        let left = due.saturating_duration_since(Instant::now());
        self.poll(
            [
                PollFd::new(waker, PollFlags::IN),
                PollFd::new(link.stream(), PollFlags::OUT),
            ],
            left,
        );
        self.inbox.after_poll();
    }

    /// Takes what has come, and what comes until all that was said has left for these peers; for a
    /// while at most. Where bytes are left unread when the program ends, or come later, the system cuts off what
    /// has not arrived, and what has arrived stays.
    pub(super) fn drain_until_sent(&self, receivers: &[&Link], until: Instant) {
        let take = || while self.read_frames() == ReadOutcome::Frames && Instant::now() < until {};
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

    /// Takes at most a frame or two from everyone.
    fn read_frames(&self) -> ReadOutcome {
        let mut outcome = ReadOutcome::Nothing;
        for (_, link) in self.others() {
            if read_frames(&link.reader) == ReadOutcome::Frames {
                outcome = ReadOutcome::Frames;
            }
        }
        outcome
    }

    /// Waits for one of these, or for bytes from anyone whose bytes can be taken.
    fn poll<const N: usize>(&self, these: [PollFd<'_>; N], pause: Duration) {
        let mut few = std::array::from_fn::<_, MAX_STACK_FDS, _>(|at| these[at.min(N - 1)].clone());
        let mut many = Vec::new();
        let fds = match self.links.len() + N <= MAX_STACK_FDS {
            true => &mut few[..],
            false => {
                many.extend_from_slice(&these);
                many.resize(self.links.len() + N, these[0].clone());
                &mut many[..]
            }
        };
        let mut count = N;
        for (_, link) in self.others() {
            if is_open(&link.reader) {
                fds[count] = PollFd::new(link.stream(), PollFlags::IN);
                count += 1;
            }
        }
        // One that failed is followed by another look.
        let _ = poll(&mut fds[..count], Some(&timespec(pause)));
    }
}

/// The interval at which to check if the final message has left.
const SEND_CHECK_INTERVAL: Duration = Duration::from_millis(1);

/// The most connections that are polled without allocating memory.
const MAX_STACK_FDS: usize = 64;
