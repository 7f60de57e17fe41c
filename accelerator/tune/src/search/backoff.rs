use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::trial_id::TrialId;

/// How long trials that fail again and again wait before they start anew: twice as long each time, while they come no
/// further. It changes no decision.
#[derive(Debug, Default)]
pub(super) struct Backoff(BTreeMap<TrialId, Failures>);

#[derive(Debug)]
struct Failures {
    /// How many iterations were done at the last failure.
    done: u64,
    repeated: u32,
    until: Instant,
    /// It was kept from starting.
    waits: bool,
}

impl Backoff {
    /// Takes the failure of a trial, of which so many iterations are done.
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
            until: now + wait,
            waits: false,
        };
        self.0.insert(trial, failures);
    }

    /// Keeps a trial from starting where its time has not come.
    pub(super) fn keeps(&mut self, trial: TrialId, now: Instant) -> bool {
        let Some(failures) = self.0.get_mut(&trial) else {
            return false;
        };
        failures.waits = now < failures.until;
        failures.waits
    }

    /// The trials that were kept and whose time has come.
    pub(super) fn due(&self, now: Instant) -> Vec<TrialId> {
        let due = |(_, failures): &(&TrialId, &Failures)| failures.waits && now >= failures.until;
        self.0.iter().filter(due).map(|(trial, _)| *trial).collect()
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
                .find(|end| !backoff.keeps(trial, start + Duration::from_millis(*end)));
            ends.unwrap()
        };
        assert_eq!([wait(2), wait(2), wait(2), wait(2)], [0, 150, 250, 450]);
        assert_eq!(wait(3), 0);
        assert_eq!((0..40).map(|_| wait(3)).last(), Some(10_000));
        backoff.failed(trial, 3, start);
        assert!(backoff.keeps(trial, start) && backoff.due(start).is_empty());
        assert_eq!(backoff.due(start + LONGEST), [trial]);
        assert!(!backoff.keeps(trial, start + LONGEST) && backoff.due(start + LONGEST).is_empty());
    }
}
