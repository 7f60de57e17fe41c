use core::panic::Location;

use accelerator_collective::{ProcessGroup, ReduceOp};
use burn::backend::DispatchTensor;

use super::reduce_context::ReduceContext;
use crate::core::error::{Error, Kind, Result};
use crate::core::tensor::from_data;
use crate::reduce::bucket_storage::{self, WriteMode};
use crate::reduce::element_values::{ElementValues, with_values};
use crate::reduce::model_state::ModelState;

/// The weight of a rank in a mean over all ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct MeanWeight {
    /// The sum over all ranks.
    pub(crate) total: f64,
    pub(crate) weight: f64,
}

/// The weighted mean over the ranks of a value for each parameter, in the buckets that gradients travel
/// in: the same bits on every rank. Values are given and returned by the numbers of their parameters, on
/// the plain device.
///
/// All ranks pass shares of the same total. A rank whose share is nothing is left out, rather than
/// multiplied by zero. If a mean is not finite, all ranks get the same error, which names the rank.
#[track_caller]
pub(crate) fn mean_over_ranks(
    context: &ReduceContext,
    model_state: &ModelState,
    values: &[DispatchTensor],
    share: MeanWeight,
) -> Result<Vec<DispatchTensor>> {
    let (group, device) = (context.group(), &context.device);
    let group = &group.for_caller(Location::caller());
    let _turn = context.guard.take(group)?;
    let layout = model_state.layout();
    let mut pending = Vec::with_capacity(layout.len());
    for number in 0..layout.len() {
        let (dtype, length) = layout.shape(number);
        let mut buffer = group.buffer(dtype, length);
        if share.weight > 0.0 {
            let members = layout.members(number).iter();
            with_values(members.map(|&at| (at, &values[at])), |at, values| {
                let range = &layout.place(at).range;
                bucket_storage::write(&mut buffer, range, values, share.weight, WriteMode::Replace);
            });
        } else {
            for &at in layout.members(number) {
                bucket_storage::clear(&mut buffer, &layout.place(at).range);
            }
        }
        pending.push(group.start_all_reduce(buffer, ReduceOp::Sum)?);
    }
    let mut means = values.to_vec();
    let mut spoilt = None;
    for (number, pending) in pending.into_iter().enumerate() {
        let sums = pending.wait()?;
        for &at in layout.members(number) {
            let known = &model_state.parameters()[at];
            let range = &layout.place(at).range;
            let data =
                bucket_storage::read(&sums, range, known.float, &known.shape, share.total, None);
            // All ranks see the same sums.
            if spoilt.is_none() && !ElementValues::of(&data).is_finite() {
                spoilt = Some(&*known.path);
            }
            means[at] = from_data(data, device);
        }
    }
    match spoilt {
        None => Ok(means),
        Some(path) => Err(whose_is_it(group, model_state, values, share, path)?),
    }
}

/// Asks all ranks whose values are not finite: the sums, of which that of `path` is not finite, do not tell.
#[track_caller]
fn whose_is_it(
    group: &ProcessGroup,
    model_state: &ModelState,
    values: &[DispatchTensor],
    share: MeanWeight,
    path: &str,
) -> Result<Error> {
    let mut first = None;
    if share.weight > 0.0 {
        with_values(values.iter().enumerate(), |at, values| {
            if !values.is_finite() {
                first = Some(first.map_or(at, |first: usize| first.min(at)));
            }
        });
    }
    let mine = first.map(|at| model_state.parameters()[at].path.clone());
    let all = group.all_gather_object(&mine)?;
    let told = all.iter().enumerate().filter_map(|(rank, path)| {
        let path = path.as_ref()?;
        Some(format!("`{path}` on rank {rank}"))
    });
    let told: Vec<_> = told.collect();
    let what = match told.is_empty() {
        true => format!(
            "parameters are finite on every rank, and too large to be added up: the sum of `{path}` is not finite"
        ),
        false => format!(
            "parameters that an average would spread to every rank are not finite: {}",
            told.join(", ")
        ),
    };
    let message = format!(
        "{what}; models are as they were: clip gradients or lower the learning rate, and continue from a checkpoint"
    );
    Ok(Error::new(Kind::NotFinite, message))
}
