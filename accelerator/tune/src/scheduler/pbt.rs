use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::trial_scheduler::{
    Observation, OtherTrials, SchedulerDecision, TrialScheduler, iteration_attr, misuse,
};
use crate::config::{Config, TrialId};
use crate::error::Result;
use crate::objective::Mode;
use crate::space::{Domain, Keys, Node, Parameter, Place, Random, Space};

/// Population based training (Jaderberg et al. 2017, arXiv 1711.09846): bad trials continue as copies of good ones, with
/// parameters that are changed a little. Ray Tune's `PopulationBasedTraining`, in its asynchronous form.
///
/// Trials have to save checkpoints.
///
/// ```
/// use accelerator_tune::{Pbt, Space, loguniform};
///
/// let pbt = Pbt::new(5.0, Space::new([("lr", loguniform(1e-4, 1e-1))]));
/// assert_eq!(pbt.quantile_fraction, 0.25);
/// ```
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Pbt {
    /// The metric that it compares; `None` is the search's.
    #[serde(default)]
    pub metric: Option<String>,
    /// The direction of the metric; `None` is the search's.
    #[serde(default)]
    pub mode: Option<Mode>,
    /// The metric that counts as time.
    #[serde(default = "iteration_attr")]
    pub time_attr: String,
    /// The time after which each trial is compared with the others.
    pub perturbation_interval: f64,
    /// No trial is compared before that time.
    #[serde(default)]
    pub burn_in_period: f64,
    /// The changes: a distribution, or a list of values, for each parameter by its path. Some configuration of the
    /// space has the parameter; suggestions of a user's [`Searcher`](crate::Searcher) cannot be known before.
    pub hyperparam_mutations: Space,
    /// The part of the population that is replaced, and the part that it is replaced by.
    #[serde(default = "default_quantile")]
    pub quantile_fraction: f64,
    /// The probability that a parameter is drawn anew instead of changed.
    #[serde(default = "default_resample")]
    pub resample_probability: f64,
    /// The factors by which a number is multiplied, either as likely as the other.
    #[serde(default = "default_factors")]
    pub perturbation_factors: (f64, f64),
}

impl PartialEq for Pbt {
    fn eq(&self, other: &Self) -> bool {
        serde_json::to_value(self).ok() == serde_json::to_value(other).ok()
    }
}

impl Pbt {
    /// Creates one with Ray's other settings.
    #[must_use]
    pub fn new(perturbation_interval: f64, hyperparam_mutations: Space) -> Self {
        Self {
            metric: None,
            mode: None,
            time_attr: iteration_attr(),
            perturbation_interval,
            burn_in_period: 0.0,
            hyperparam_mutations,
            quantile_fraction: default_quantile(),
            resample_probability: default_resample(),
            perturbation_factors: default_factors(),
        }
    }

    pub(super) fn build(&self, mode: Mode, seed: u64) -> Result<Box<dyn TrialScheduler>> {
        let (interval, burn_in) = (self.perturbation_interval, self.burn_in_period);
        let (quantile, resample) = (self.quantile_fraction, self.resample_probability);
        let (up, down) = self.perturbation_factors;
        for (is_right, what) in [
            (
                interval > 0.0 && interval.is_finite(),
                format!("`perturbation_interval` is {interval}; it is above 0"),
            ),
            (
                burn_in.is_finite(),
                format!("`burn_in_period` is {burn_in}; it must be a finite number"),
            ),
            (
                up.is_finite() && down.is_finite(),
                format!("`perturbation_factors` are {up} and {down}; they must be finite numbers"),
            ),
            (
                (0.0..=0.5).contains(&quantile),
                format!("`quantile_fraction` is {quantile}; it is from 0 to 0.5"),
            ),
            (
                (0.0..=1.0).contains(&resample),
                format!("`resample_probability` is {resample}; it is from 0 to 1"),
            ),
        ] {
            if !is_right {
                return Err(misuse("pbt", &what));
            }
        }
        Ok(Box::new(Population {
            settings: self.clone(),
            mode,
            seed,
            mutations: self.mutations()?,
            members: BTreeMap::new(),
            saves: 0,
            exploits: 0,
        }))
    }

    /// Fails if it changes parameters that no configuration has.
    pub(super) fn check_parameters(&self, keys: &Keys) -> Result<()> {
        for (path, mutation) in self.mutations()? {
            let what = match (keys.place(&path), mutation) {
                (Place::Value, _) | (Place::Group, Mutation::List(_)) => continue,
                (Place::Group, Mutation::Domain(_)) => "which is a table or a list of parameters",
                (Place::Nothing, _) => "which no configuration has",
            };
            let instead = keys.instead_of(&path);
            let what = format!("`hyperparam_mutations` has `{path}`, {what}{instead}");
            return Err(misuse("pbt", &what));
        }
        Ok(())
    }

    fn mutations(&self) -> Result<Vec<(String, Mutation)>> {
        let mut mutations = Vec::new();
        for (name, parameter) in self.hyperparam_mutations.table() {
            add_mutations(name, parameter, &mut mutations)?;
        }
        self.hyperparam_mutations.check()?;
        if mutations.is_empty() {
            return Err(misuse(
                "pbt",
                "`hyperparam_mutations` is empty; name what is to be changed",
            ));
        }
        Ok(mutations)
    }
}

#[derive(Debug)]
struct Population {
    settings: Pbt,
    mode: Mode,
    seed: u64,
    mutations: Vec<(String, Mutation)>,
    members: BTreeMap<TrialId, Member>,
    saves: u64,
    exploits: u64,
}

#[derive(Debug)]
struct Member {
    config: Config,
    last_perturbation: f64,
    /// The score at its last comparison.
    score: Option<f64>,
    time: f64,
    /// The iteration and the time of its checkpoint, if it was among the best at its last comparison.
    checkpoint: Option<(u64, f64)>,
    exploits: u64,
}

#[derive(Clone, Debug)]
enum Mutation {
    Domain(Domain),
    /// A list: one of these values is drawn, or a neighbour of the present one is taken.
    List(Vec<Value>),
}

impl Population {
    fn explore(&self, config: &Config, random: &mut Random) -> Config {
        let mut config = config.clone();
        for (path, mutation) in &self.mutations {
            // If another option of a choice was drawn, the parameter is absent.
            let Some(value) = config.value(path).cloned() else {
                continue;
            };
            let resamples = random.unit() < self.settings.resample_probability;
            let changed = match mutation {
                Mutation::List(values) => {
                    let at = values.iter().position(|known| *known == value);
                    let index = match at {
                        Some(at) if !resamples => match random.below(2) {
                            0 => at.saturating_sub(1),
                            _ => (at + 1).min(values.len() - 1),
                        },
                        _ => random.index(values.len()),
                    };
                    values[index].clone()
                }
                Mutation::Domain(domain) => match value.as_f64() {
                    Some(number) if !resamples => {
                        let (up, down) = self.settings.perturbation_factors;
                        let factor = if random.below(2) == 0 { up } else { down };
                        domain.clamp(number * factor)
                    }
                    _ => domain.sample(random),
                },
            };
            config.set(path, changed);
        }
        config
    }

    fn exploit(&mut self, trial: TrialId, upper: &[TrialId]) -> Option<SchedulerDecision> {
        let exploits = self.members.get(&trial)?.exploits;
        let parts: [&[u8]; 3] = [
            b"exploit",
            &trial.number().to_le_bytes(),
            &exploits.to_le_bytes(),
        ];
        let mut random = Random::of(self.seed, &parts);
        let donor = upper[random.index(upper.len())];
        let from = self.members.get(&donor)?;
        let (iteration, time) = from.checkpoint?;
        let config = self.explore(&from.config, &mut random);
        let member = self.members.get_mut(&trial)?;
        member.config = config.clone();
        member.last_perturbation = time;
        member.time = time;
        // Its own score stays until its next comparison: with the donor's it could be taken for a donor, of which no
        // checkpoint is there.
        member.exploits += 1;
        self.exploits += 1;
        Some(SchedulerDecision::Exploit {
            donor,
            iteration,
            config,
        })
    }
}

impl TrialScheduler for Population {
    fn on_trial_add(&mut self, trial: TrialId, config: &Config) {
        let member = Member {
            config: config.clone(),
            last_perturbation: 0.0,
            score: None,
            time: 0.0,
            checkpoint: None,
            exploits: 0,
        };
        self.members.insert(trial, member);
    }

    fn on_trial_result(
        &mut self,
        observation: Observation,
        others_wait: bool,
    ) -> SchedulerDecision {
        let Observation {
            trial,
            iteration,
            time,
            value,
        } = observation;
        let Some(member) = self.members.get_mut(&trial) else {
            return SchedulerDecision::Continue;
        };
        if time < self.settings.burn_in_period
            || time - member.last_perturbation < self.settings.perturbation_interval
        {
            return SchedulerDecision::Continue;
        }
        member.score = value;
        member.time = time;
        member.last_perturbation = time;
        let scored = self.members.iter().filter_map(|(trial, member)| {
            let score = member.score.filter(|score| !score.is_nan())?;
            Some((*trial, score))
        });
        let fraction = self.settings.quantile_fraction;
        let (lower, upper) = quantiles(scored.collect(), self.mode, fraction);
        let is_upper = upper.contains(&trial);
        if let Some(member) = self.members.get_mut(&trial) {
            // Of a trial that is not among the best any more, no checkpoint is cloned.
            member.checkpoint = is_upper.then_some((iteration, time));
        }
        if lower.contains(&trial)
            && let Some(exploit) = self.exploit(trial, &upper)
        {
            return exploit;
        }
        self.saves += u64::from(is_upper);
        match (others_wait, is_upper) {
            (true, _) => SchedulerDecision::Pause,
            (false, true) => SchedulerDecision::Save,
            (false, false) => SchedulerDecision::Continue,
        }
    }

    fn on_trial_complete(&mut self, last: Observation) {
        // A trial that has ended is no part of the population, as to Ray.
        self.members.remove(&last.trial);
    }

    fn on_trial_error(&mut self, trial: TrialId) {
        self.members.remove(&trial);
    }

    fn choose_trial_to_run(&mut self, paused: &[TrialId], others: OtherTrials) -> Option<TrialId> {
        if others == OtherTrials::Pending {
            return None;
        }
        // The one that is behind.
        let time = |trial: &TrialId| self.members.get(trial).map_or(0.0, |member| member.time);
        let mut paused = paused.iter().copied();
        let first = paused.next()?;
        Some(
            paused.fold(first, |least, trial| match time(&trial) < time(&least) {
                true => trial,
                false => least,
            }),
        )
    }

    fn status(&self) -> Vec<String> {
        vec![format!(
            "PopulationBasedTraining: {} checkpoints, {} perturbs",
            self.saves, self.exploits
        )]
    }
}

/// The worst and the best of a population.
pub(super) fn quantiles(
    mut scored: Vec<(TrialId, f64)>,
    mode: Mode,
    fraction: f64,
) -> (Vec<TrialId>, Vec<TrialId>) {
    if scored.len() <= 1 {
        return (Vec::new(), Vec::new());
    }
    scored.sort_by(|(_, left), (_, right)| mode.compare(*left, *right));
    #[expect(clippy::cast_precision_loss, reason = "a count of trials")]
    let count = (scored.len() as f64 * fraction).ceil();
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "at most half of the population"
    )]
    let count = (count as usize).min(scored.len() / 2);
    let ids = |trials: &[(TrialId, f64)]| trials.iter().map(|(trial, _)| *trial).collect();
    (ids(&scored[..count]), ids(&scored[scored.len() - count..]))
}

fn add_mutations(
    path: &str,
    parameter: &Parameter,
    mutations: &mut Vec<(String, Mutation)>,
) -> Result<()> {
    let mutation = match &parameter.0 {
        Node::Domain(domain) => Mutation::Domain(*domain),
        Node::Constant(Value::Array(values)) if !values.is_empty() => {
            Mutation::List(values.clone())
        }
        Node::Choice(options) => {
            let values = options.iter().map(|option| match &option.0 {
                Node::Constant(value) => Ok(value.clone()),
                _ => {
                    let what =
                        format!("the options of `{path}` in `hyperparam_mutations` are values");
                    Err(misuse("pbt", &what))
                }
            });
            Mutation::List(values.collect::<Result<_>>()?)
        }
        Node::Table(table) => {
            for (name, parameter) in table {
                add_mutations(&format!("{path}/{name}"), parameter, mutations)?;
            }
            return Ok(());
        }
        _ => {
            let what = format!(
                "`{path}` in `hyperparam_mutations` is neither a distribution nor a list of values"
            );
            return Err(misuse("pbt", &what));
        }
    };
    mutations.push((path.to_owned(), mutation));
    Ok(())
}

fn default_quantile() -> f64 {
    0.25
}

fn default_resample() -> f64 {
    0.25
}

fn default_factors() -> (f64, f64) {
    (1.2, 0.8)
}
