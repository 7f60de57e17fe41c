use super::trial_scheduler::{Observation, OtherTrials, SchedulerDecision, TrialScheduler, oldest};
use crate::config::Config;
use crate::trial_id::TrialId;

/// Every trial runs to its end.
#[derive(Debug)]
pub(super) struct Fifo;

impl TrialScheduler for Fifo {
    fn on_trial_add(&mut self, _trial: TrialId, _config: &Config) {}

    fn on_trial_result(
        &mut self,
        _observation: Observation,
        _others_wait: bool,
    ) -> SchedulerDecision {
        SchedulerDecision::Continue
    }

    fn on_trial_complete(&mut self, _last: Observation) {}

    fn on_trial_error(&mut self, _trial: TrialId) {}

    fn choose_trial_to_run(&mut self, paused: &[TrialId], others: OtherTrials) -> Option<TrialId> {
        oldest(paused, others)
    }

    fn status(&self) -> Vec<String> {
        vec!["Using FIFO scheduling algorithm.".to_owned()]
    }
}
