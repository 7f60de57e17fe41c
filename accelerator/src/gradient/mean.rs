use core::panic::Location;

use accelerator_collective::ReduceOp;
use burn::backend::DispatchTensor;
use burn::tensor::Tensor;

use super::bucket::{self, Entry};
use super::rank::with_rank;
use super::slot::Slot;
use super::values::with_values;
use crate::accelerator::Accelerator;
use crate::error::Result;
use crate::local::Share;

/// The weighted mean over the ranks of a value for each parameter, in the buckets that gradients travel
/// in: the same bits on every rank. Values are given and returned by the numbers of their parameters, on
/// the plain device.
///
/// All ranks pass shares of the same total. A rank whose share is nothing is left out, rather than
/// multiplied by zero.
#[track_caller]
pub(crate) fn mean_over_ranks(
    accelerator: &Accelerator,
    slot: &Slot,
    values: &[DispatchTensor],
    share: Share,
) -> Result<Vec<DispatchTensor>> {
    let (group, device) = (accelerator.group(), &accelerator.shared.device);
    let caller = Location::caller();
    let _turn = accelerator.shared.turn.take(group)?;
    let layout = slot.layout();
    let mut pending = Vec::with_capacity(layout.len());
    for number in 0..layout.len() {
        let mut buffer = layout.allocate_one(group, number);
        if share.weight > 0.0 {
            let members = layout.members(number).iter();
            with_values(members.map(|&at| (at, &values[at])), |at, values| {
                let range = &layout.place(at).range;
                bucket::write(&mut buffer, range, values, share.weight, Entry::Replace);
            });
        } else {
            for &at in layout.members(number) {
                bucket::clear(&mut buffer, &layout.place(at).range);
            }
        }
        pending.push(group.start_all_reduce_at(buffer, ReduceOp::Sum, caller)?);
    }
    let mut means = values.to_vec();
    for (number, pending) in pending.into_iter().enumerate() {
        let sums = pending.wait()?;
        for &at in layout.members(number) {
            let known = &slot.parameters()[at];
            let range = &layout.place(at).range;
            let data = bucket::read(&sums, range, known.float, &known.shape, share.total, None);
            let dtype = data.dtype();
            means[at] = with_rank!(known.shape.len(), D => {
                Tensor::<D>::from_data(data, (device, dtype)).into_dispatch()
            });
        }
    }
    Ok(means)
}
