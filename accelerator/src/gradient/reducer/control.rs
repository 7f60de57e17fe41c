//! What ranks tell each other beside the sums.

use accelerator_collective::{Buffer, DType, ProcessGroup, ReduceOp};

use super::{Pace, Reducer, waited};
use crate::agreement::sides;
use crate::error::{Error, Result};
use crate::timeline::{Part, Phase};

/// How many numbers stand in front of the flags: weight, Σ weight · loss, the number of micro-steps
/// and its square, the number that tells models apart and its square, and how many ranks want the norm.
pub(in crate::gradient) const HEADER: usize = 7;

/// The place of the last of them.
pub(super) const WANTS_NORM: usize = 6;

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
        (*weight, *loss) = (self.total, self.loss);
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

    pub(super) fn receive_control(&mut self) -> Result<()> {
        if let Some(control) = self.control.take() {
            let bytes = 8 * (HEADER + self.ledger.here.len() + self.ledger.wrong.len() + 1);
            self.ledger.control = Some(waited(&self.timeline, Part::Control, bytes, control)?);
        }
        let ledger = &mut self.ledger;
        let values = values(&ledger.control)?;
        for (present, count) in ledger.present.iter_mut().zip(&values[HEADER..]) {
            *present = *count > 0.0;
        }
        if let (Some(last), Some(trigger)) = (values.last(), &self.trigger) {
            trigger.receive(*last);
        }
        Ok(())
    }
}

/// Whether windows of the same length, of the same model, ended on all ranks. All ranks see the same
/// numbers, so all get the same error.
pub(super) fn check_windows(reducer: &Reducer) -> Result<()> {
    let values = values(&reducer.ledger.control)?;
    let group = &reducer.group;
    if !is_one_number(group, values[4], values[5]) {
        let asking = group.for_purpose("average gradients");
        let all = asking.all_gather_object(&reducer.model.to_string())?;
        return Err(Error::misuse(format!(
            "the ranks average gradients of different models with each other: {}; call `backward` for the \
             models in the same order on every rank",
            sides(all)
        )));
    }
    if !is_one_number(group, values[2], values[3]) {
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

/// The same, without a word to the others.
pub(super) fn windows_agree(reducer: &Reducer) -> Result<bool> {
    let values = values(&reducer.ledger.control)?;
    let group = &reducer.group;
    Ok(is_one_number(group, values[2], values[3]) && is_one_number(group, values[4], values[5]))
}

/// Whether all ranks have the same whole number, by its sum and that of its squares: the mean of the
/// squares is the square of the mean where there is no variance.
fn is_one_number(group: &ProcessGroup, sum: f64, squares: f64) -> bool {
    squares * group.world_size() as f64 == sum * sum
}

/// The header, which parameters have gradients, which buckets are to be reduced again, and how many
/// ranks have raised the flag of `set_trigger`.
pub(super) fn values(control: &Option<Buffer>) -> Result<&[f64]> {
    Ok(match control {
        Some(control) => control.as_slice::<f64>()?,
        None => &[],
    })
}
