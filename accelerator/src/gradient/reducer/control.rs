//! What ranks tell each other beside the sums.

use accelerator_collective::{Buffer, DType, ProcessGroup, ReduceOp};

use super::{Pace, Reducer, waited};
use crate::agreement::sides;
use crate::error::{Error, Kind, Result};
use crate::timeline::{Part, Phase};

/// How many numbers a control vector has.
pub(in crate::gradient) fn length(parameters: usize, buckets: usize) -> usize {
    HEADER + parameters + buckets + 1
}

/// How many stand in front of the flags; see [`Told`].
const HEADER: usize = 7;

/// What all ranks have told each other in a control vector: sums over them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Told<'a> {
    pub(super) weight: f64,
    /// Σ weight · loss.
    pub(super) loss: f64,
    /// Of micro-steps, and of their squares.
    steps: [f64; 2],
    /// Of what tells models apart, and of its squares.
    model: [f64; 2],
    /// How many ranks want the norm.
    norm: f64,
    /// By parameter: how many ranks have a gradient.
    present: &'a [f64],
    /// By bucket: on how many ranks something is odd about it.
    odd: &'a [f64],
    /// What `Trigger` tells.
    trigger: f64,
}

impl<'a> Told<'a> {
    /// What came of a window of so many parameters.
    pub(super) fn read(control: &'a Option<Buffer>, parameters: usize) -> Result<Self> {
        let values = match control {
            Some(control) => control.as_slice::<f64>()?,
            None => &[],
        };
        let [
            weight,
            loss,
            steps,
            steps_squared,
            model,
            model_squared,
            norm,
            flags @ ..,
            trigger,
        ] = values
        else {
            return Err(Error::new(
                Kind::Collective,
                "what ranks tell each other of a window was given up before it came",
            ));
        };
        let (present, odd) = flags.split_at(parameters.min(flags.len()));
        Ok(Self {
            weight: *weight,
            loss: *loss,
            steps: [*steps, *steps_squared],
            model: [*model, *model_squared],
            norm: *norm,
            present,
            odd,
            trigger: *trigger,
        })
    }

    pub(super) fn wants_norm(&self) -> bool {
        self.norm > 0.0
    }

    /// By bucket: whether something is odd about it on some rank.
    pub(super) fn odd(&self) -> impl Iterator<Item = bool> {
        self.odd.iter().map(|ranks| *ranks > 0.0)
    }

    /// Whether windows of the same length, of the same model, ended on all ranks.
    pub(super) fn windows_agree(&self, group: &ProcessGroup) -> bool {
        is_one_number(group, self.steps) && is_one_number(group, self.model)
    }
}

impl Reducer {
    /// Lets the ranks add up their weights, before anybody sends.
    pub(super) fn start_weighing(&mut self) -> Result<()> {
        let spare = self.ledger.total.take();
        let mut total = spare.unwrap_or_else(|| self.group.buffer(DType::F64, 1));
        total.as_mut_slice::<f64>()?[0] = self.total;
        let pending = self
            .group
            .start_all_reduce_at(total, ReduceOp::Sum, self.caller)?;
        self.promise.give();
        self.weighing = Some(pending);
        Ok(())
    }

    /// Whether it is so on all ranks.
    pub(super) fn all_agree(&mut self, here: bool) -> Result<bool> {
        let spare = self.ledger.total.take();
        let mut others = spare.unwrap_or_else(|| self.group.buffer(DType::F64, 1));
        others.as_mut_slice::<f64>()?[0] = f64::from(u8::from(!here));
        self.group
            .all_reduce_buffer_at(&mut others, ReduceOp::Max, self.caller)?;
        self.promise.give();
        let everywhere = others.as_slice::<f64>()? == [0.0];
        self.ledger.total = Some(others);
        Ok(everywhere)
    }

    pub(super) fn send_control(&mut self) -> Result<()> {
        let ledger = &mut self.ledger;
        let Some(mut control) = ledger.control.take() else {
            return Ok(());
        };
        let [
            weight,
            loss,
            steps,
            steps_squared,
            model,
            model_squared,
            wants_norm,
            rest @ ..,
        ] = control.as_mut_slice::<f64>()?
        else {
            return Ok(());
        };
        (*weight, *loss) = (self.total, self.loss.read);
        *steps = self.micro_steps as f64;
        *steps_squared = *steps * *steps;
        *model = f64::from(self.model.mark());
        *model_squared = *model * *model;
        *wants_norm = f64::from(u8::from(self.wants_norm));
        let here = ledger.written.iter().zip(&ledger.here);
        let here = here.map(|(written, here)| written | here);
        for (value, flag) in rest
            .iter_mut()
            .zip(here.chain(ledger.wrong.iter().copied()))
        {
            *value = f64::from(u8::from(flag));
        }
        if let (Some(last), Some(trigger)) = (rest.last_mut(), &self.trigger) {
            *last = trigger.send();
        }
        match self.pace {
            Pace::Nowhere => self.ledger.control = Some(control),
            Pace::InFlight => {
                let pending =
                    self.group
                        .start_all_reduce_at(control, ReduceOp::Sum, self.caller)?;
                self.promise.give();
                self.control = Some(pending);
            }
            Pace::Blocking => {
                let (part, bytes) = (Part::Control, control.bytes().len());
                let _reduce = self.timeline.span(Phase::Reduce { part, bytes });
                self.group
                    .all_reduce_buffer_at(&mut control, ReduceOp::Sum, self.caller)?;
                self.promise.give();
                self.ledger.control = Some(control);
            }
        }
        Ok(())
    }

    /// What all ranks have told each other, once it is there.
    pub(super) fn told(&self) -> Result<Told<'_>> {
        Told::read(&self.ledger.control, self.ledger.present.len())
    }

    pub(super) fn receive_control(&mut self) -> Result<()> {
        if let Some(control) = self.control.take() {
            let ledger = &self.ledger;
            let bytes = 8 * length(ledger.here.len(), ledger.wrong.len());
            self.ledger.control = Some(waited(&self.timeline, Part::Control, bytes, control)?);
        }
        let ledger = &mut self.ledger;
        let told = Told::read(&ledger.control, ledger.present.len())?;
        for (present, ranks) in ledger.present.iter_mut().zip(told.present) {
            *present = *ranks > 0.0;
        }
        if let Some(trigger) = &self.trigger {
            trigger.receive(told.trigger);
        }
        Ok(())
    }
}

/// Whether windows of the same length, of the same model, ended on all ranks. All ranks see the same
/// numbers, so all get the same error.
pub(super) fn check_windows(reducer: &Reducer) -> Result<()> {
    let told = reducer.told()?;
    let group = &reducer.group;
    if !is_one_number(group, told.model) {
        let asking = group.for_purpose("average gradients");
        let all = asking.all_gather_object(&reducer.model.to_string())?;
        return Err(Error::misuse(format!(
            "the ranks average gradients of different models with each other: {}; call `backward` for the \
             models in the same order on every rank",
            sides(all)
        )));
    }
    if !is_one_number(group, told.steps) {
        let asking = group.for_purpose("average gradients");
        let all = asking.all_gather(&[reducer.micro_steps as u64])?;
        let shown: Vec<_> = (0..)
            .zip(&all)
            .map(|(rank, calls)| format!("{calls} on rank {rank}"))
            .collect();
        return Err(Error::misuse(format!(
            "the accumulation windows that end here hold different numbers of `backward` calls: {}; call \
             `no_sync` and `trigger_sync` in the same steps on every rank, and run the same number of \
             steps",
            shown.join(", ")
        )));
    }
    Ok(())
}

/// Whether all ranks have the same whole number, by its sum and that of its squares: the mean of the
/// squares is the square of the mean where there is no variance.
fn is_one_number(group: &ProcessGroup, [sum, squares]: [f64; 2]) -> bool {
    squares * group.world_size() as f64 == sum * sum
}
