use core::fmt;
use std::collections::{BTreeMap, BTreeSet, HashSet};

use accelerator_collective::ProcessGroup;
use burn::lr_scheduler::LrSchedulerRecord;
use burn::module::ParamId;
use burn::optim::{ModuleOptimizer, OptimizerRecord};
use burn::tensor::{Bytes, DType, Device};
use burn_pack::Reader;
use serde::{Deserialize, Serialize};

use super::schedule::{Manual, ScheduleUnit, Scheduled, Scheduler};
use super::sharded::{FullState, Shards, probe};
use super::{PreparedOptimizer, StepOutcome};
use crate::core::error::{Error, Kind, Result};
use crate::core::scalar::Scalar;
use crate::model::Trainable;

/// An optimizer at one moment, cheap to take: its tensors become bytes when they are asked for.
pub(crate) struct OptimizerSnapshot {
    /// Of a sharded optimizer, this rank's part.
    joint: Option<FullState>,
    optimizer: ModuleOptimizer,
    pub(crate) state: OptimizerState,
}

/// What a checkpoint keeps of an optimizer beside Burn's record.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub(crate) struct OptimizerState {
    pub(crate) factor: f64,
    /// The rate of the first step of all, where the program tells it.
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
    /// Before it gave the current rate, if it has given one.
    before: Option<Vec<u8>>,
    after: Vec<u8>,
    /// The current base rate, without the factor of the job.
    #[serde(default)]
    rate: Option<f64>,
    /// The epoch of the current rate, where it advances with epochs.
    epoch: Option<u64>,
    per_epoch: bool,
    #[serde(default)]
    per_process: bool,
}

impl OptimizerState {
    /// What its schedule, if it has one, gave for the last step, without the factor of the job.
    pub(crate) fn scheduled_rate(&self) -> Option<f64> {
        self.schedule.as_ref()?.rate
    }
}

impl OptimizerSnapshot {
    /// Burn's record, as the bytes of a file.
    pub(crate) fn bytes(&self) -> Result<Bytes> {
        match &self.joint {
            Some(joint) => joint.bytes(),
            None => bytes_of(&self.optimizer),
        }
    }

    /// Brings the state of a sharded optimizer together on rank 0. All ranks call it.
    #[track_caller]
    pub(crate) fn gather(&mut self, group: &ProcessGroup) -> Result<()> {
        match &mut self.joint {
            Some(joint) => joint.gather(group, &self.optimizer),
            None => Ok(()),
        }
    }

    /// Whether there is state of other ranks beside it.
    pub(crate) fn is_sharded(&self) -> bool {
        self.joint.is_some()
    }
}

impl<S> PreparedOptimizer<S> {
    pub(crate) fn snapshot(&self) -> Result<OptimizerSnapshot>
    where
        S: ScheduleKind,
    {
        Ok(OptimizerSnapshot {
            joint: self.shards.as_ref().map(Shards::joint),
            optimizer: self.optimizer.clone(),
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

    /// What its schedule, if it has one, gave for the last step, without the factor of the job.
    pub(crate) fn scheduled_rate(&self) -> Option<f64>
    where
        S: ScheduleKind,
    {
        self.schedule.rate()
    }

    /// Goes on from a saved state, as the optimizer that errors call `name`. Rates are multiplied
    /// by `factor` from here on.
    pub(crate) fn resume_from(
        mut self,
        name: &str,
        state: OptimizerState,
        record: Bytes,
        factor: f64,
    ) -> Result<Self>
    where
        S: ScheduleKind,
    {
        self.schedule.restore(name, state.schedule)?;
        let last_rate = state.outcome.map(|(rate, _)| rate);
        self.schedule.resume_rates(state.first_rate, last_rate);
        let kept = self.shards.is_some().then(|| window(&record)).transpose()?;
        self.resumed = ids_in(&record)?;
        let blank = match &self.shards {
            Some(shards) => shards.blank(),
            None => self.optimizer,
        };
        self.optimizer = load(name, blank, record)?;
        self.unchecked = None;
        if let (Some(shards), Some(record)) = (&mut self.shards, kept) {
            self.optimizer = shards.resume_from(record)?;
        }
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

/// The bytes of the tensors of an optimizer's state.
pub(super) fn size_of(optimizer: &ModuleOptimizer) -> Result<usize> {
    let tensors = reader(bytes_of(optimizer)?)?
        .into_tensors()
        .map_err(unwritable)?;
    Ok(tensors.iter().map(burn_pack::Tensor::byte_len).sum())
}

/// Gives an optimizer the state in a record as it was saved. Burn starts afresh, silently, with what it does not
/// know, and rounds to the float type of its default device.
pub(super) fn load(name: &str, blank: ModuleOptimizer, record: Bytes) -> Result<ModuleOptimizer> {
    let saved = RecordFields::of(&record)?;
    let optimizer = blank
        .from_bytes(record)
        .map_err(|error| unreadable(name, error))?;
    let loaded = RecordFields::of(&bytes_of(&optimizer)?)?;
    if saved.names() != loaded.names() {
        let found = match &*loaded.kept() {
            NOTHING => "none of it".to_owned(),
            kept => kept.to_owned(),
        };
        return Err(Error::new(
            Kind::Checkpoint,
            format!(
                "the checkpoint does not fit {name}: of each parameter it keeps {}, and this program's optimizer \
                 took {found}, so it is of another kind, or has other settings (SGD with momentum keeps a \
                 velocity, Adam and AdamW two moments); build the optimizer that was saved",
                saved.kept(),
            ),
        ));
    }
    let differs = |(field, saved): (&String, &Option<DType>)| {
        let found = loaded.types.get(field)?;
        (found != saved).then_some((field.clone(), (*saved)?, (*found)?))
    };
    match saved.types.iter().find_map(differs) {
        None => Ok(optimizer),
        Some((field, saved_in, found)) => Err(Error::new(
            Kind::Checkpoint,
            format!(
                "{name} cannot go on: {} was saved in {}, and Burn loads it in {}; {HINT}",
                saved.shown(&field),
                ShownType(saved_in),
                ShownType(found),
            ),
        )),
    }
}

/// The parameters that a record has state for.
fn ids_in(record: &Bytes) -> Result<HashSet<u64>> {
    let fields = RecordFields::of(record)?;
    Ok(fields.types.keys().filter_map(|name| id_of(name)).collect())
}

/// What was saved of a parameter, and what this optimizer keeps of it, where that is not the same: settings, such as a
/// momentum, are in no record.
///
/// A parameter of one dimension is asked for, as biases are: of others, some optimizers keep what depends on the size.
pub(crate) fn other_state(
    optimizer: &ModuleOptimizer,
    record: &Bytes,
    parameter: impl Fn(ParamId) -> Option<Trainable>,
    device: &Device,
) -> Result<Option<(String, String)>> {
    let saved = RecordFields::of(record)?;
    let mut known = saved.types.keys().filter_map(|name| id_of(name));
    let known = known.find_map(|id| parameter(ParamId::from(id)).filter(|it| it.shape.len() == 1));
    let Some(known) = known else {
        return Ok(None);
    };
    let blank = optimizer.clone().load_record(OptimizerRecord::default());
    let Some(fresh) = probe::step_sample(&blank, &known, device) else {
        return Ok(None);
    };
    let id = known.id.val();
    let (saved, fresh) = (
        saved.kept_of(id),
        RecordFields::of(&bytes_of(&fresh)?)?.kept_of(id),
    );
    Ok((saved != fresh).then_some((saved, fresh)))
}

/// Refuses state that a program has loaded in another float type than the optimizer keeps it in. `parameter` tells
/// what is known by an id.
pub(crate) fn check_types(
    optimizer: &ModuleOptimizer,
    parameter: impl Fn(ParamId) -> Option<Trainable>,
    device: &Device,
) -> Result<()> {
    let loaded = RecordFields::of(&bytes_of(optimizer)?)?;
    for (field, dtype) in &loaded.types {
        let Some((parameter, dtype)) = id_of(field)
            .and_then(|id| parameter(ParamId::from(id)))
            .zip(*dtype)
        else {
            continue;
        };
        if dtype == parameter.float.dtype() {
            continue;
        }
        // An optimizer may keep state in a type of its own.
        let blank = optimizer.clone().load_record(OptimizerRecord::default());
        let Some(fresh) = probe::step_sample(&blank, &parameter, device) else {
            continue;
        };
        let fresh = RecordFields::of(&bytes_of(&fresh)?)?;
        if let Some(Some(expected)) = fresh.types.get(field)
            && *expected != dtype
        {
            return Err(Error::new(
                Kind::Checkpoint,
                format!(
                    "the optimizer has {} in {}, and keeps it in {}, as its parameter is: Burn loads state in \
                     the float type of its default device; {HINT}",
                    loaded.shown(field),
                    ShownType(dtype),
                    ShownType(*expected),
                ),
            ));
        }
    }
    Ok(())
}

/// Whether the state in `record` belongs to parameters with these ids alone.
pub(crate) fn check_known(name: &str, record: &Bytes, ids: &HashSet<u64>) -> Result<()> {
    let strangers = ids_in(record)?.difference(ids).count();
    if strangers == 0 {
        return Ok(());
    }
    Err(Error::misuse(format!(
        "{name} has state for {strangers} parameters of models that are not beside it: save, and resume, an \
         optimizer together with its model"
    )))
}

/// What a schedule, or the want of one, keeps in a checkpoint.
pub(crate) trait ScheduleKind {
    /// What it gave for the last step.
    fn rate(&self) -> Option<f64>;

    fn state(&self) -> Result<Option<ScheduleState>>;

    fn restore(&mut self, name: &str, state: Option<ScheduleState>) -> Result<()>;

    /// What the program told for the first step of all.
    fn first_rate(&self) -> Option<f64> {
        None
    }

    /// What the program told for the first step of all, and for the last one before a resume.
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
            Some(_) => Err(other_schedule(name, "a scheduler", "none")),
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
            return Err(other_schedule(name, "no scheduler", "one"));
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
            return Err(other_schedule(name, &saved, &found));
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
            "another kind of scheduler, or one with other settings",
            "this one",
        ))
    }
}

/// What an optimizer without state keeps of a parameter, for errors.
const NOTHING: &str = "nothing";

/// Everything that is in a record.
struct RecordFields {
    /// Of parameters, by id.
    paths: BTreeMap<String, String>,
    /// By name; `None` for numbers that are no tensors.
    types: BTreeMap<String, Option<DType>>,
}

impl RecordFields {
    fn of(record: &Bytes) -> Result<Self> {
        let reader = reader(window(record)?)?;
        let paths = reader.metadata().clone();
        let scalars: Vec<_> = reader.scalars().keys().cloned().collect();
        let tensors = reader.into_tensors().map_err(unwritable)?.into_iter();
        let tensors = tensors.map(|tensor| (tensor.name, Some(tensor.dtype)));
        let scalars = scalars.into_iter().map(|name| (name, None));
        Ok(Self {
            paths,
            types: tensors.chain(scalars).collect(),
        })
    }

    fn names(&self) -> BTreeSet<&String> {
        self.types.keys().collect()
    }

    /// What is kept of each parameter, for errors.
    fn kept(&self) -> String {
        Self::listed(self.types.keys())
    }

    /// What is kept of one parameter, for errors.
    fn kept_of(&self, id: u64) -> String {
        Self::listed(self.types.keys().filter(|name| id_of(name) == Some(id)))
    }

    fn listed<'a>(names: impl Iterator<Item = &'a String>) -> String {
        let fields = names.filter_map(|name| Some(name.split_once('.')?.1));
        // Burn's own note of a parameter's dimensions is in every record.
        let fields: BTreeSet<&str> = fields.filter(|field| *field != "__rank").collect();
        let fields: Vec<_> = fields.iter().map(|field| format!("`{field}`")).collect();
        match &*fields {
            [] => NOTHING.to_owned(),
            fields => fields.join(", "),
        }
    }

    /// What errors call an entry.
    fn shown(&self, field: &str) -> String {
        let (id, field) = field.split_once('.').unwrap_or(("", field));
        let path = self.paths.get(id).map_or(id, String::as_str);
        format!("the state of parameter `{path}` (`{field}`)")
    }
}

/// The id of the parameter that an entry of a record is of.
fn id_of(field: &str) -> Option<u64> {
    field.split_once('.')?.0.parse().ok()
}

/// As messages show a type.
struct ShownType(DType);

impl fmt::Display for ShownType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&format!("{:?}", self.0).to_lowercase())
    }
}

/// What to do where Burn cannot load state in the type of its parameter.
const HINT: &str = "build the optimizer with `init_fused()`, which loads the state of Adam, AdamW and SGD in the type \
                    in which it was saved, or give the default device the type of the parameters before the first \
                    tensor: `Device::default().configure(…)`";

fn scalars(record: &[u8]) -> Result<Vec<(String, String)>> {
    let reader = reader(Bytes::from_bytes_vec(record.to_vec()))?;
    let scalars = reader.scalars().iter();
    Ok(scalars
        .map(|(name, value)| (name.clone(), format!("{value:?}")))
        .collect())
}

/// The same bytes, without a copy; they must be shared.
fn window(record: &Bytes) -> Result<Bytes> {
    record
        .view(0, record.len())
        .map_err(|_| unwritable("its bytes are not shared"))
}

pub(super) fn reader(record: Bytes) -> Result<Reader> {
    Reader::from_bytes(record).map_err(|error| {
        Error::with_source(
            Kind::Checkpoint,
            "the record of an optimizer or a scheduler cannot be read",
            error.to_string(),
        )
    })
}

/// Shared, so that names can be read from them without a copy.
pub(super) fn bytes_of(optimizer: &ModuleOptimizer) -> Result<Bytes> {
    optimizer
        .into_bytes()
        .map(Bytes::shared)
        .map_err(unwritable)
}

fn to_bytes(record: LrSchedulerRecord) -> Result<Vec<u8>> {
    record
        .into_bytes()
        .map(|bytes| bytes.to_vec())
        .map_err(unwritable)
}

pub(super) fn unwritable(error: impl core::fmt::Display) -> Error {
    Error::with_source(
        Kind::Checkpoint,
        "the state of an optimizer cannot be written",
        error.to_string(),
    )
}

fn unreadable(name: &str, error: impl core::fmt::Display) -> Error {
    Error::with_source(
        Kind::Checkpoint,
        format!("the state of {name} cannot be read"),
        error.to_string(),
    )
}

fn other_schedule(name: &str, saved: &str, found: &str) -> Error {
    Error::new(
        Kind::Checkpoint,
        format!(
            "the checkpoint does not fit {name}: it was saved with {saved}, and has {found} in \
             this program; prepare it with the scheduler that was saved"
        ),
    )
}
