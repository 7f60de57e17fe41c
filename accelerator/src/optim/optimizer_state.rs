use accelerator_collective::ProcessGroup;
use burn::lr_scheduler::LrSchedulerRecord;
use burn::optim::ModuleOptimizer;
use burn::tensor::Bytes;
use serde::{Deserialize, Serialize};

use super::prepared::{PreparedOptimizer, StepOutcome};
use super::record_io::{bytes_of, load, scalars, to_bytes, unreadable, window};
use super::schedule::{Manual, ScheduleUnit, Scheduled, Scheduler};
use super::sharded::{FullState, RankRecord};
use crate::core::error::{Error, Result};
use crate::core::offload::Offload;
use crate::core::tensor::Scalar;

/// An optimizer at one moment, cheap to take: its tensors become bytes when they are asked for.
pub(crate) struct OptimizerSnapshot {
    /// Set for a sharded optimizer, of which `optimizer` holds this rank's part.
    full_state: Option<FullState>,
    optimizer: ModuleOptimizer,
    /// The offload folder for its bytes, if offloading is on.
    offload: Option<Offload>,
    pub(crate) state: OptimizerState,
}

/// The state of an optimizer that a checkpoint keeps beside Burn's record.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub(crate) struct OptimizerState {
    pub(crate) factor: f64,
    /// The rate of the first step of all, if the program passes it.
    #[serde(default)]
    first_rate: Option<f64>,
    /// Rate and norm of the last step, if the model was updated by it.
    outcome: Option<(f64, Option<f64>)>,
    schedule: Option<ScheduleState>,
    /// The scale of the last step's loss, if the model was not updated since gradients were not finite.
    #[serde(default)]
    skipped: Option<f64>,
    pub(crate) steps: u64,
}

/// A scheduler, as Burn's records.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub(crate) struct ScheduleState {
    /// Its state before it gave the current rate, if it has given one.
    before: Option<Vec<u8>>,
    after: Vec<u8>,
    /// The current base rate, without the factor of the job.
    #[serde(default)]
    rate: Option<f64>,
    /// The epoch of the current rate, if it advances with epochs.
    epoch: Option<u64>,
    per_epoch: bool,
    #[serde(default)]
    per_process: bool,
}

impl OptimizerState {
    /// Returns the rate that its schedule, if it has one, gave for the last step, without the factor of the job.
    pub(crate) fn scheduled_rate(&self) -> Option<f64> {
        self.schedule.as_ref()?.rate
    }
}

impl OptimizerSnapshot {
    pub(crate) fn bytes(&self) -> Result<Bytes> {
        let _offloading = Offload::enter(self.offload.as_ref());
        match &self.full_state {
            Some(full_state) => full_state.bytes(),
            None => bytes_of(&self.optimizer),
        }
    }

    /// Brings the state of a sharded optimizer together on rank 0. All ranks call it.
    #[track_caller]
    pub(crate) fn gather(&mut self, group: &ProcessGroup) -> Result<()> {
        let _offloading = Offload::enter(self.offload.as_ref());
        match &mut self.full_state {
            Some(full_state) => full_state.gather(group, &self.optimizer),
            None => Ok(()),
        }
    }

    pub(crate) fn is_sharded(&self) -> bool {
        self.full_state.is_some()
    }
}

impl<S> PreparedOptimizer<S> {
    /// Returns `true` if it was prepared as [`Sharded`](super::Sharded), on several ranks.
    pub(crate) fn is_sharded(&self) -> bool {
        self.shards.is_some()
    }

    pub(crate) fn snapshot(&self) -> Result<OptimizerSnapshot>
    where
        S: ScheduleKind,
    {
        Ok(OptimizerSnapshot {
            full_state: match &self.shards {
                Some(shards) => Some(shards.full_state()),
                None => self.pieces.full_state(),
            },
            optimizer: self.optimizer.clone(),
            offload: self.pieces.offload.clone(),
            state: OptimizerState {
                factor: self.factor,
                first_rate: self.schedule.first_rate(),
                outcome: match self.outcome() {
                    StepOutcome::Stepped { rate, norm } => Some((rate, norm)),
                    StepOutcome::Accumulated
                    | StepOutcome::Idle
                    | StepOutcome::Lost
                    | StepOutcome::Skipped { .. } => None,
                },
                schedule: self.schedule.state()?,
                skipped: match self.outcome {
                    StepOutcome::Skipped { scale } => Some(scale),
                    StepOutcome::Accumulated
                    | StepOutcome::Idle
                    | StepOutcome::Lost
                    | StepOutcome::Stepped { .. } => None,
                },
                steps: self.steps,
            },
        })
    }

    /// Returns the rate that its schedule, if it has one, gave for the last step, without the factor of the job.
    pub(crate) fn scheduled_rate(&self) -> Option<f64>
    where
        S: ScheduleKind,
    {
        self.schedule.rate()
    }

    /// Continues from a saved state, as the optimizer that errors call `name`. Rates are multiplied
    /// by `factor` from here on.
    pub(crate) fn resume_from(
        mut self,
        name: &str,
        state: OptimizerState,
        record: RankRecord,
        factor: f64,
    ) -> Result<Self>
    where
        S: ScheduleKind,
    {
        self.schedule.restore(name, state.schedule)?;
        let last_rate = state.outcome.map(|(rate, _)| rate);
        self.schedule.resume_rates(state.first_rate, last_rate);
        let RankRecord {
            bytes: record,
            ids,
            partitions,
        } = record;
        let kept = self.shards.is_some().then(|| window(&record)).transpose()?;
        self.resumed = ids;
        let blank = match &self.shards {
            Some(shards) => shards.blank(),
            None => self.optimizer,
        };
        let _offloading = Offload::enter(self.pieces.offload.as_ref());
        self.optimizer = load(name, blank, record)?;
        self.unchecked = None;
        if let (Some(shards), Some(record)) = (&mut self.shards, kept) {
            self.optimizer = shards.resume_from(record)?;
        }
        self.pieces.reset(partitions);
        self.factor = factor;
        self.steps = state.steps;
        self.norm = state.outcome.and_then(|(_, norm)| norm).map(Scalar::from);
        self.outcome = match (state.outcome, state.skipped) {
            (Some((rate, norm)), _) => StepOutcome::Stepped { rate, norm },
            (None, Some(scale)) => StepOutcome::Skipped { scale },
            (None, None) => StepOutcome::Accumulated,
        };
        Ok(self)
    }
}

/// The state that a schedule, or the lack of one, keeps in a checkpoint.
pub(crate) trait ScheduleKind {
    fn rate(&self) -> Option<f64>;

    fn state(&self) -> Result<Option<ScheduleState>>;

    fn restore(&mut self, name: &str, state: Option<ScheduleState>) -> Result<()>;

    /// Returns the rate that the program passed for the very first step.
    fn first_rate(&self) -> Option<f64> {
        None
    }

    /// Takes the rates that the program passed for the very first step, and for the last one before a resume.
    fn resume_rates(&mut self, _first: Option<f64>, _last: Option<f64>) {}
}

impl ScheduleKind for Manual {
    fn rate(&self) -> Option<f64> {
        None
    }

    fn state(&self) -> Result<Option<ScheduleState>> {
        Ok(None)
    }

    fn restore(&mut self, name: &str, state: Option<ScheduleState>) -> Result<()> {
        match state {
            None => Ok(()),
            Some(_) => Err(other_schedule(name, Some("a scheduler"), "none")),
        }
    }

    fn first_rate(&self) -> Option<f64> {
        self.0.first()
    }

    fn resume_rates(&mut self, first: Option<f64>, last: Option<f64>) {
        self.0.resume(first, last);
    }
}

impl ScheduleKind for Scheduled {
    fn rate(&self) -> Option<f64> {
        self.0.last()
    }

    fn state(&self) -> Result<Option<ScheduleState>> {
        let scheduler = &self.0;
        let epoch = match scheduler.unit {
            ScheduleUnit::Step | ScheduleUnit::Process { .. } => None,
            ScheduleUnit::Epoch { last } => last,
        };
        Ok(Some(ScheduleState {
            before: scheduler.before.clone().map(to_bytes).transpose()?,
            after: to_bytes(scheduler.scheduler.to_record())?,
            rate: scheduler.last(),
            epoch,
            per_epoch: matches!(scheduler.unit, ScheduleUnit::Epoch { .. }),
            per_process: matches!(scheduler.unit, ScheduleUnit::Process { .. }),
        }))
    }

    fn restore(&mut self, name: &str, state: Option<ScheduleState>) -> Result<()> {
        let Some(state) = state else {
            return Err(other_schedule(name, None, "one"));
        };
        let scheduler = &mut self.0;
        let saved = match (state.per_epoch, state.per_process) {
            (true, _) => "epoch",
            (false, true) => "process",
            (false, false) => "step",
        };
        let found = scheduler.unit.name();
        if saved != found {
            let (saved, found) = (format!("a scheduler by {saved}"), format!("one by {found}"));
            return Err(other_schedule(name, Some(&saved), &found));
        }
        if let ScheduleUnit::Epoch { last } = &mut scheduler.unit {
            *last = state.epoch;
        }
        scheduler.resume_from(name, &state)
    }
}

impl Scheduler {
    /// Loads how it stood and steps once more, which gives the rate again.
    fn resume_from(&mut self, name: &str, state: &ScheduleState) -> Result<()> {
        let first = state.before.as_ref().unwrap_or(&state.after);
        let record = LrSchedulerRecord::from_bytes(Bytes::from_bytes_vec(first.clone()))
            .map_err(|error| unreadable(name, error))?;
        self.scheduler = self.scheduler.clone().load_record(record.clone());
        if state.before.is_some() {
            self.current = Some(self.scheduler.step());
            self.before = Some(record);
        }
        // Burn resets a scheduler, silently, that gets the record of another kind.
        let loaded = to_bytes(self.scheduler.to_record())?;
        if scalars(&loaded)? == scalars(&state.after)? {
            return Ok(());
        }
        Err(other_schedule(
            name,
            Some("another kind of scheduler, or one with other settings"),
            "this one",
        ))
    }
}

/// The error of an optimizer that has another scheduler than the one with which it was saved, if it had one.
fn other_schedule(name: &str, saved: Option<&str>, found: &str) -> Error {
    let (saved, remedy) = match saved {
        Some(saved) => (saved, "prepare it with the scheduler that was saved"),
        None => ("no scheduler", "prepare it without a scheduler"),
    };
    Error::checkpoint(format!(
        "the checkpoint does not fit {name}: it was saved with {saved}, and has {found} in this program; {remedy}, or train \
         from the beginning"
    ))
}
