use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::trial_id::TrialId;

/// The waits of trials that fail again and again before they start anew: each twice as long as the one before, while
/// the trial gets no further. They change no decision.
#[derive(Debug, Default)]
pub(super) struct Backoff(BTreeMap<TrialId, Failures>);

#[derive(Debug)]
struct Failures {
    /// The number of iterations that were done at the last failure.
    done: u64,
    repeated: u32,
    /// The time from which it may start; `None` if it may start, and once [`Backoff::take_due`] has
    /// returned the trial.
    until: Option<Instant>,
}

impl Backoff {
    /// Counts a failure of a trial, of which so many iterations are done.
    pub(super) fn failed(&mut self, trial: TrialId, done: u64, now: Instant) {
        let before = self.0.get(&trial).filter(|before| before.done == done);
        let repeated = before.map_or(0, |before| before.repeated.saturating_add(1));
        let factor = 1_u32
            .checked_shl(repeated.saturating_sub(1))
            .unwrap_or(u32::MAX);
        let wait = match repeated {
            0 => Duration::ZERO,
            _ => FIRST.saturating_mul(factor).min(LONGEST),
        };
        let failures = Failures {
            done,
            repeated,
            until: (!wait.is_zero()).then(|| now + wait),
        };
        self.0.insert(trial, failures);
    }

    /// Returns `true` if a trial may not start yet.
    pub(super) fn is_waiting(&self, trial: TrialId, now: Instant) -> bool {
        let until = self.0.get(&trial).and_then(|failures| failures.until);
        until.is_some_and(|until| now < until)
    }

    /// The trials that may start from now on, each once.
    pub(super) fn take_due(&mut self, now: Instant) -> Vec<TrialId> {
        let due = |failures: &mut Failures| failures.until.take_if(|until| now >= *until);
        let waiting = self.0.iter_mut();
        let due = waiting.filter_map(|(trial, failures)| due(failures).map(|_| *trial));
        due.collect()
    }
}

const FIRST: Duration = Duration::from_millis(100);
const LONGEST: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trial_that_comes_no_further_waits_twice_as_long_each_time() {
        let (mut backoff, trial, start) = (Backoff::default(), TrialId::new(3), Instant::now());
        let mut wait = |done| {
            backoff.failed(trial, done, start);
            let ends = [0, 50, 150, 250, 450, 9_900, 10_000]
                .into_iter()
                .find(|end| !backoff.is_waiting(trial, start + Duration::from_millis(*end)));
            ends.unwrap()
        };
        assert_eq!([wait(2), wait(2), wait(2), wait(2)], [0, 150, 250, 450]);
        assert_eq!(wait(3), 0);
        assert_eq!((0..40).map(|_| wait(3)).last(), Some(10_000));
        backoff.failed(trial, 3, start);
        assert!(backoff.is_waiting(trial, start) && backoff.take_due(start).is_empty());
        assert_eq!(backoff.take_due(start + LONGEST), [trial]);
        assert!(backoff.take_due(start + LONGEST).is_empty());
    }
}
