use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::names;
use crate::objective::Objective;
use crate::stop::Stop;
use crate::trial_id::TrialId;
use crate::view::TrialResult;

/// The order in which reports are decided about.
///
/// ```
/// use accelerator_tune::SearchOrder;
///
/// let ordered: SearchOrder = serde_json::from_str(r#"{"ordered": {"workers": 4}}"#)?;
/// assert_eq!(ordered, SearchOrder::Ordered { workers: 4 });
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum SearchOrder {
    /// The order in which they arrive: no slot waits for another, and another run may decide otherwise.
    #[default]
    Eager,
    /// The order in which that many workers would give them if each iteration took the same time. Decisions then follow
    /// from the specification and what trials report: they are the same at any number of slots, at any speed, and after
    /// any interruption. A trial that is faster than others waits for them.
    Ordered {
        /// The number of trials that are under way at a time. If there are fewer slots, they take turns.
        workers: usize,
    },
}

/// The settings by which the core decides.
#[derive(Debug)]
pub(crate) struct Rules {
    pub(crate) objective: Objective,
    /// The metric and the time that the scheduler looks at.
    pub(crate) scheduler_metric: String,
    pub(crate) scheduler_time: String,
    pub(crate) stop: Stop,
    pub(crate) order: SearchOrder,
    /// The number of failed attempts at a trial that are repeated; `None` for no limit.
    pub(crate) max_failures: Option<u32>,
    /// A checkpoint after every so many iterations.
    pub(crate) checkpoint_frequency: Option<u64>,
    /// A checkpoint when a trial ends.
    pub(crate) checkpoint_at_end: bool,
    /// The maximum number of trials.
    pub(crate) max_trials: Option<u32>,
    /// The number of trials that the searcher is asked for before they can begin.
    pub(crate) lookahead: usize,
    /// Set if trials continue from those whose configurations were the same up to there.
    pub(crate) shares_prefixes: bool,
    /// Set if trials have to report every metric that is named here.
    pub(crate) are_metrics_strict: bool,
}

impl Rules {
    /// Fails where the result has not all metrics that are looked at.
    pub(super) fn check_metrics(&self, trial: TrialId, result: &TrialResult) -> Result<()> {
        let own = [
            ("metric", &*self.objective.metric),
            ("scheduler.metric", &self.scheduler_metric),
            ("scheduler.time_attr", &self.scheduler_time),
        ];
        let of_stop = self.stop.metrics().map(|metric| ("stop", metric));
        let mut named = own.into_iter().chain(of_stop);
        let missing = named.find(|(_, metric)| result.value(metric).is_none());
        let Some((place, metric)) = missing.filter(|_| self.are_metrics_strict) else {
            return Ok(());
        };
        let reported: Vec<_> = result.metrics.iter().map(|(name, _)| name).collect();
        let meant = names::nearest(metric, reported.iter().copied());
        let meant = meant.map(|name| format!("; did you mean `{name}`?"));
        Err(Error::misuse(format!(
            "`{place}` names the metric `{metric}`, and trial {trial} has reported without it: {}{} Correct the name, report it \
             from the first iteration on, or, where trials measure it later, set `disable_strict_metric_checking`",
            match reported.is_empty() {
                true => "nothing".to_owned(),
                false => reported.join(", "),
            },
            meant.as_deref().unwrap_or(".")
        )))
    }
}
