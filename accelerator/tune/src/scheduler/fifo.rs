use super::policy::{Observation, Policy, Supply, Verdict, oldest};
use crate::config::Config;
use crate::trial_id::TrialId;

/// Every trial runs to its end.
#[derive(Debug)]
pub(super) struct Fifo;

impl Policy for Fifo {
    fn add(&mut self, _trial: TrialId, _config: &Config) {}

    fn report(&mut self, _observation: Observation, _waits: bool) -> Verdict {
        Verdict::Continue
    }

    fn complete(&mut self, _last: Observation) {}

    fn fail(&mut self, _trial: TrialId) {}

    fn resume(&mut self, paused: &[TrialId], supply: Supply) -> Option<TrialId> {
        oldest(paused, supply)
    }

    fn status(&self) -> Vec<String> {
        vec!["Using FIFO scheduling algorithm.".to_owned()]
    }
}
