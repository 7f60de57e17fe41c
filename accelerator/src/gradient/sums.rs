use core::ops::Range;
use std::sync::Arc;

use accelerator_collective::{Buffer, Part, ReduceOp};
use burn::module::ParamId;
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor};

use super::bucket::{self, BLOCK};
use super::layout::Place;
use super::ledger::Ledger;
use super::rank::with_rank;
use super::slot::Slot;
use super::spread::Spread;
use crate::error::{Error, Result};
use crate::model::Trainable;

/// Sums, whose ledger goes back to its slot.
pub(super) struct Sums {
    /// There until it is dropped.
    pub(super) ledger: Option<Ledger>,
    /// What sums are divided by: the total weight, times the scale of the loss.
    pub(super) divisor: f64,
    pub(super) loss: f64,
    /// Of how many ranks they are.
    pub(super) ranks: usize,
    pub(super) slot: Arc<Slot>,
    /// Which of them this rank has.
    pub(super) spread: Spread,
    pub(super) total: f64,
}

impl Sums {
    /// The parameters that have a gradient, in path order, and where its sum lies.
    pub(super) fn there(
        &self,
    ) -> impl Iterator<Item = (usize, &Trainable, &Buffer, &Range<usize>)> {
        let parameters = self.slot.parameters().iter().enumerate();
        parameters.filter_map(|(index, parameter)| {
            let (sums, range) = self.place(index)?;
            Some((index, parameter, sums, range))
        })
    }

    /// Whether this rank has its own part of them alone.
    pub(super) fn is_spread(&self) -> bool {
        !self.spread.is_whole()
    }

    /// Which elements of a parameter this rank has the sums of.
    fn own(&self, index: usize) -> Range<usize> {
        let shape = &self.slot.parameters()[index].shape;
        self.spread.of_parameter(index, shape.iter().product())
    }

    /// By parameter: the sum of `|x|^order` of its elements, or the largest magnitude where the order is
    /// infinite; 0 for what has no gradient, or is not asked for. Where sums are spread, each rank adds its
    /// own blocks up, and all ranks call it.
    #[track_caller]
    pub(super) fn powers(&self, order: f64, asked: impl Fn(usize) -> bool) -> Result<Vec<f64>> {
        let mut blocks = Vec::new();
        let mut places = Vec::new();
        for (at, _, buffer, range) in self.there().filter(|(at, ..)| asked(*at)) {
            let own = self.own(at);
            let (start, count) = (blocks.len(), range.len().div_ceil(BLOCK));
            blocks.resize(start + own.start.div_ceil(BLOCK), 0.0);
            let own = range.start + own.start..range.start + own.end;
            bucket::powers(buffer, &own, self.divisor, order, |power| {
                blocks.push(power)
            });
            blocks.resize(start + count, 0.0);
            places.push((at, start..start + count));
        }
        if let Spread::Own { group, .. } = &self.spread {
            // Those of others are 0 here, which changes no bit.
            let op = match order.is_infinite() {
                true => ReduceOp::Max,
                false => ReduceOp::Sum,
            };
            let measuring = group.for_purpose("the norm of gradients");
            measuring.all_reduce(&mut blocks, op)?;
        }
        let mut powers = vec![0.0; self.slot.parameters().len()];
        for (at, range) in places {
            let blocks = blocks[range].iter().copied();
            powers[at] = bucket::joined(blocks, self.divisor, order);
        }
        Ok(powers)
    }

    /// What the other ranks wait for does not come: they are told, and no step takes place.
    pub(super) fn give_up(&self, error: &Error) {
        if let Spread::Own { group, .. } = &self.spread {
            group.abort(format!(
                "it could not take part in what all ranks do with gradients: {error}"
            ));
        }
    }

    /// Gives this rank the sums of all. All ranks call it.
    #[track_caller]
    pub(super) fn make_whole(&mut self) -> Result<()> {
        let (Spread::Own { cuts, group }, Some(ledger)) = (&self.spread, &mut self.ledger) else {
            return Ok(());
        };
        let group = group.for_purpose("the gradients of all ranks");
        let layout = ledger.layout.clone();
        let mut parts = vec![Vec::new(); group.world_size()];
        for (rank, parts) in parts.iter_mut().enumerate() {
            for bucket in 0..layout.len() {
                let width = layout.width(bucket);
                let ranges = cuts.buckets[bucket].of(rank).iter();
                parts.extend(ranges.map(|range| Part {
                    buffer: bucket,
                    bytes: range.start * width..range.end * width,
                }));
            }
        }
        let mut buffers = ledger.summed();
        let mut whole: Vec<Vec<u8>> = buffers
            .iter()
            .map(|buffer| vec![0; buffer.bytes().len()])
            .collect();
        group.all_gather_parts(&mut buffers, &parts, |rank, number, bytes| {
            let Part { buffer, bytes: at } = &parts[rank][number];
            whole[*buffer][at.clone()].copy_from_slice(bytes);
        })?;
        for (buffer, whole) in buffers.into_iter().zip(whole) {
            buffer.bytes_mut().copy_from_slice(&whole);
        }
        self.spread = Spread::Whole;
        Ok(())
    }

    /// Where the sum of a parameter lies, if it has a gradient.
    pub(super) fn place(&self, index: usize) -> Option<(&Buffer, &Range<usize>)> {
        let ledger = self.ledger.as_ref()?;
        let place = ledger.layout.place(index);
        let sums = ledger.sums(place.bucket)?;
        ledger.present[index].then_some((sums, &place.range))
    }

    /// The same, to be changed.
    pub(super) fn place_mut(&mut self, index: usize) -> Option<(&mut Buffer, Range<usize>)> {
        let ledger = self.ledger.as_mut()?;
        if !ledger.present[index] {
            return None;
        }
        let Place { bucket, range } = ledger.layout.place(index).clone();
        Some((ledger.sums_mut(bucket)?, range))
    }

    /// Replaces every element, given the number of its parameter and the element of the average.
    pub(super) fn change(&mut self, new: impl Fn(usize, f64) -> f64) {
        let divisor = self.divisor;
        for index in 0..self.slot.parameters().len() {
            let own = self.own(index);
            if let Some((sums, place)) = self.place_mut(index) {
                let own = place.start + own.start..place.start + own.end;
                bucket::change(sums, &own, |value| new(index, value / divisor));
            }
        }
        self.divisor = 1.0;
    }

    /// The gradients of the parameters that are asked for. Elements are multiplied by the factor of their
    /// parameter, where there are any.
    pub(super) fn params(
        &self,
        device: &Device,
        factors: &[f64],
        asked: impl Fn(ParamId) -> bool,
    ) -> GradientsParams {
        let mut gradients = GradientsParams::new();
        for (index, parameter, buffer, range) in self.there() {
            if !asked(parameter.id) {
                continue;
            }
            let factor = factor(factors, index);
            let (float, shape) = (parameter.float, &parameter.shape);
            let data = bucket::read(buffer, range, float, shape, self.divisor, factor);
            let dtype = data.dtype();
            with_rank!(parameter.shape.len(), D => {
                let gradient = Tensor::<D>::from_data(data, (device, dtype));
                gradients.register(parameter.id, gradient);
            });
        }
        gradients
    }
}

/// What the elements of a parameter are multiplied by. What is 1 changes no bit, and costs nothing where
/// it is left out.
pub(super) fn factor(factors: &[f64], index: usize) -> Option<f64> {
    factors.get(index).copied().filter(|&factor| factor != 1.0)
}

impl Drop for Sums {
    fn drop(&mut self) {
        if let Some(ledger) = self.ledger.take() {
            self.slot.take_back(ledger);
        }
    }
}
