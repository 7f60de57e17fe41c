//! What ranks tell each other beside the sums.

use accelerator_collective::{Buffer, DType, ProcessGroup, ReduceOp};
use accelerator_plan::mix;

use super::{Pace, Reducer, waited};
use crate::agreement::sides;
use crate::error::{Error, Kind, Result};
use crate::gradient::failed_calls::BackwardCall;
use crate::gradient::non_finite_loss;
use crate::gradient::slot::Slot;
use crate::timeline::{Part, Phase};

/// How many numbers a control vector has.
pub(in crate::gradient) fn length(parameters: usize, buckets: usize) -> usize {
    HEADER + parameters + buckets + 1
}

/// How many stand in front of the flags; see [`ControlSums`].
const HEADER: usize = 10;

/// What all ranks have told each other in a control vector: sums over them.
#[derive(Clone, Copy, Debug)]
pub(super) struct ControlSums<'a> {
    pub(super) weight: f64,
    /// Σ weight · loss.
    pub(super) loss: f64,
    /// Of what tells windows apart, and of its echoes.
    window: [f64; 2],
    /// How many ranks know from which batches their window was made, and of what tells those apart, and of its echoes.
    batches: [f64; 3],
    /// Of what tells the losses of ranks apart, and of its echoes.
    losses: [f64; 2],
    /// How many ranks want the norm.
    norm: f64,
    /// By parameter: how many ranks have a gradient.
    present: &'a [f64],
    /// By bucket: on how many ranks something is odd about it.
    odd: &'a [f64],
    /// What `Trigger` tells.
    trigger: f64,
}

impl<'a> ControlSums<'a> {
    /// What came of a window of so many parameters.
    pub(super) fn read(control: &'a Option<Buffer>, parameters: usize) -> Result<Self> {
        let values = match control {
            Some(control) => control.as_slice::<f64>()?,
            None => &[],
        };
        let [
            weight,
            loss,
            window,
            echo,
            known,
            batches,
            batches_echo,
            losses,
            losses_echo,
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
            window: [*window, *echo],
            batches: [*known, *batches, *batches_echo],
            losses: [*losses, *losses_echo],
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

    /// Whether windows of the same length, of the same model and the same batches, ended on all ranks, none of which
    /// has missed one.
    pub(super) fn windows_agree(&self, group: &ProcessGroup) -> bool {
        let ranks = group.world_size();
        let [known, batches @ ..] = self.batches;
        is_one_fingerprint(ranks, ranks, self.window)
            && (known == 0.0 || is_one_fingerprint(ranks, known as usize, batches))
    }

    /// Whether all ranks have told a loss, which is the same to the bit.
    pub(super) fn losses_agree(&self, group: &ProcessGroup) -> bool {
        let ranks = group.world_size();
        ranks > 1 && is_one_fingerprint(ranks, ranks, self.losses)
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
            window,
            window_echo,
            known,
            batches,
            batches_echo,
            losses,
            losses_echo,
            wants_norm,
            rest @ ..,
        ] = control.as_mut_slice::<f64>()?
        else {
            return Ok(());
        };
        (*weight, *loss) = (self.total, self.loss.read);
        let ranks = self.group.world_size();
        let failed = self.call.as_ref().map_or(0, BackwardCall::count);
        let here = [self.model.number(), self.micro_steps as u64, failed];
        let here = fingerprint(ranks, &here);
        (*window, *window_echo) = (here as f64, echo(ranks, here) as f64);
        (*known, *batches, *batches_echo) = match self.batches.number() {
            Some(number) => {
                let number = fingerprint(ranks, &[number]);
                (1.0, number as f64, echo(ranks, number) as f64)
            }
            None => (0.0, 0.0, 0.0),
        };
        // Where there is nothing to learn, or nothing more, losses are the same whatever they are of. One that was
        // not read, since devices add it up, is 0 here.
        let is_told = self.loss.read.is_finite() && self.loss.read != 0.0;
        (*losses, *losses_echo) = match is_told {
            true => {
                let loss = fingerprint(ranks, &[self.loss.read.to_bits()]);
                (loss as f64, echo(ranks, loss) as f64)
            }
            false => (0.0, 0.0),
        };
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
    pub(super) fn sums(&self) -> Result<ControlSums<'_>> {
        ControlSums::read(&self.ledger.control, self.ledger.present.len())
    }

    pub(super) fn receive_control(&mut self) -> Result<()> {
        if let Some(control) = self.control.take() {
            let ledger = &self.ledger;
            let bytes = 8 * length(ledger.here.len(), ledger.wrong.len());
            self.ledger.control = Some(waited(&self.timeline, Part::Control, bytes, control)?);
        }
        let ledger = &mut self.ledger;
        let sums = ControlSums::read(&ledger.control, ledger.present.len())?;
        if let Some(call) = &self.call {
            call.mark_synchronized();
        }
        for (present, ranks) in ledger.present.iter_mut().zip(sums.present) {
            *present = *ranks > 0.0;
        }
        if let Some(trigger) = &self.trigger {
            trigger.receive(sums.trigger);
        }
        Ok(())
    }
}

/// Whether windows of the same length, of the same model and the same batches, ended on all ranks, none of which has
/// missed one. All ranks see the same numbers, so all get the same error.
pub(super) fn check_windows(reducer: &Reducer) -> Result<()> {
    let group = &reducer.group;
    if reducer.sums()?.windows_agree(group) {
        return Ok(());
    }
    let failed = reducer.call.as_ref().map(BackwardCall::failed);
    let mine = (
        failed.unwrap_or_default(),
        reducer.model.to_string(),
        reducer.micro_steps as u64,
        reducer.marks.last().map(|mark| mark.position),
    );
    let asking = group.for_purpose("average gradients");
    let all = asking.all_gather_object(&mine)?;
    let least = all.iter().map(|(failed, ..)| failed.calls).min();
    let missed = (0..)
        .zip(&all)
        .filter(|(_, (failed, ..))| Some(failed.calls) > least);
    let missed: Vec<_> = missed
        .map(|(rank, (failed, ..))| format!("rank {rank} ({})", failed.last))
        .collect();
    if !missed.is_empty() {
        return Err(Error::misuse(format!(
            "`backward` failed on {} before the other ranks heard of it, and the program went on, so that ranks \
             average the gradients of different steps: return the error from the program, or resume the model \
             on every rank",
            missed.join(", ")
        )));
    }
    let models: Vec<_> = all.iter().map(|(_, model, ..)| model.clone()).collect();
    if models.iter().any(|model| *model != models[0]) {
        return Err(Error::misuse(format!(
            "the ranks average gradients of different models with each other: {}; call `backward` for the \
             models in the same order on every rank",
            sides(models)
        )));
    }
    if all.iter().all(|(_, _, calls, _)| *calls == all[0].2) {
        let last = all.iter().map(|(.., last)| match last {
            Some(position) => position.to_string(),
            None => "a weight that is of no batch".to_owned(),
        });
        return Err(Error::misuse(format!(
            "the ranks average gradients of different batches, so that samples are used twice or never ({}): a rank \
             has left out a batch, left its loop early or counts its epochs on its own; take the same batches in \
             the same steps on every rank, and pass `batch.with_weight(0.0)` for one that is to count for nothing; \
             loaders count from 0, as they were prepared",
            sides(last)
        )));
    }
    let shown: Vec<_> = (0..)
        .zip(&all)
        .map(|(rank, (_, _, calls, _))| format!("{calls} on rank {rank}"))
        .collect();
    Err(Error::misuse(format!(
        "the accumulation windows that end here hold different numbers of `backward` calls: {}; call \
         `no_sync` and `trigger_sync` in the same steps on every rank, and run the same number of \
         steps",
        shown.join(", ")
    )))
}

/// Asks all ranks which of them has a loss that is not finite: nothing tells it in the sum.
pub(super) fn whose_loss(reducer: &Reducer, slot: &Slot) -> Result<Error> {
    let (rank, loss) = (reducer.group.rank(), reducer.loss.read);
    if reducer.pace == Pace::Nowhere {
        return Ok(non_finite_loss::error(slot, &[(rank, loss)]));
    }
    let asking = reducer.group.for_purpose("average gradients");
    let all = asking.all_gather_object(&(rank, loss))?;
    Ok(non_finite_loss::error(slot, &all))
}

/// What tells windows apart, in as many bits as leave the sum over the ranks exact in an `f64`.
fn fingerprint(ranks: usize, window: &[u64]) -> u64 {
    mix(window) % ((1 << f64::MANTISSA_DIGITS) / ranks as u64)
}

/// What goes with a fingerprint, so that its sum tells whether all of them are one.
fn echo(ranks: usize, fingerprint: u64) -> u64 {
    self::fingerprint(ranks, &[fingerprint])
}

/// Whether so many of the ranks, which told theirs, have the same fingerprint, by the sums of fingerprints and of their
/// echoes: where they are one, it is the mean, and so is its echo. All ranks see the same sums, and come to the same.
fn is_one_fingerprint(ranks: usize, senders: usize, [fingerprints, echoes]: [f64; 2]) -> bool {
    let mean = fingerprints as u64 / senders as u64;
    let sum = |one: u64| (one * senders as u64) as f64;
    sum(mean) == fingerprints && sum(echo(ranks, mean)) == echoes
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// What ranks come to that are in these windows.
    fn agree(windows: &[[u64; 3]]) -> bool {
        agree_beside(0, windows)
    }

    /// The same, where there are so many more that tell nothing.
    fn agree_beside(others: usize, windows: &[[u64; 3]]) -> bool {
        let (ranks, senders) = (windows.len() + others, windows.len());
        let all = || windows.iter().map(|window| fingerprint(ranks, window));
        let sum = |numbers: &mut dyn Iterator<Item = u64>| numbers.map(|one| one as f64).sum();
        let echoes = &mut all().map(|one| echo(ranks, one));
        is_one_fingerprint(ranks, senders, [sum(&mut all()), sum(echoes)])
    }

    proptest! {
        #[test]
        fn ranks_agree_where_all_of_them_are_in_one_window(
            window: [u64; 3],
            others in proptest::collection::vec(any::<[u64; 3]>(), 1..4),
            ranks in 1_usize..5000,
            silent in 0_usize..5000,
        ) {
            let mut windows = vec![window; ranks];
            prop_assert!(agree(&windows) && agree_beside(silent, &windows));
            windows.extend(others);
            prop_assert!(!agree(&windows) && !agree_beside(silent, &windows));
        }
    }

    #[test]
    fn windows_that_differ_in_one_number_are_told_apart() {
        let window = [7, 3, 0];
        for at in 0..3 {
            let mut other = window;
            other[at] += 1;
            assert!(!agree(&[window, other]) && !agree(&[window, other, window]));
        }
    }
}
