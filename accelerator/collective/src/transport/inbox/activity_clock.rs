//! The signs of work that a rank shows while it is in no collective.

use std::time::{Duration, Instant};

use accelerator_host::sync::{Mutex, MutexGuard};

/// The last sign of work of one rank, which ranks that wait for it count as progress.
#[derive(Debug, Default)]
pub(crate) struct ActivityClock(Mutex<ActivityState>);

#[derive(Debug, Default)]
struct ActivityState {
    last: Option<Instant>,
    /// The number of pieces of work under way that cannot show activity themselves.
    busy: usize,
    /// The time for which each of them counts as a sign after the last one.
    limit: Duration,
}

impl ActivityClock {
    /// Notes that this rank works at this moment.
    pub(crate) fn record(&self) {
        self.lock().last = Some(Instant::now());
    }

    /// Notes that work begins which shows activity all the time, for at most `limit` after the last
    /// one that was [recorded](Self::record).
    pub(crate) fn begin(&self, limit: Duration) {
        let mut state = self.lock();
        state.last = Some(Instant::now());
        state.busy += 1;
        state.limit = limit;
    }

    /// Notes that it has ended.
    pub(crate) fn end(&self) {
        let mut state = self.lock();
        state.last = state.seen(Instant::now());
        state.busy -= 1;
    }

    /// The time of this rank's last sign of work.
    pub(crate) fn last(&self) -> Option<Instant> {
        self.lock().seen(Instant::now())
    }

    fn lock(&self) -> MutexGuard<'_, ActivityState> {
        self.0.lock()
    }
}

impl ActivityState {
    fn seen(&self, now: Instant) -> Option<Instant> {
        let last = self.last?;
        match self.busy {
            0 => Some(last),
            // A limit that no clock can hold never ends.
            _ => Some(last.checked_add(self.limit).map_or(now, |end| end.min(now))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn busy_work_counts_until_its_limit() {
        let activity = ActivityClock::default();
        assert_eq!(activity.last(), None);
        activity.record();
        let shown = activity.last().unwrap();
        assert_eq!(activity.last(), Some(shown), "one sign is one moment");
        activity.begin(Duration::from_secs(10));
        let state = activity.lock();
        let began = state.last.unwrap();
        let after = |seconds| state.seen(began + Duration::from_secs(seconds)).unwrap() - began;
        assert_eq!(after(7), Duration::from_secs(7));
        assert_eq!(after(70), Duration::from_secs(10));
        drop(state);
        activity.begin(Duration::MAX);
        let state = activity.lock();
        let later = state.last.unwrap() + Duration::from_secs(70);
        assert_eq!(state.seen(later), Some(later));
        drop(state);
        activity.end();
        activity.end();
        assert_eq!(activity.last(), activity.lock().last);
    }
}
