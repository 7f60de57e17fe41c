//! Steps that read sums of gradients where they lie.
//!
//! An optimizer of Burn's takes gradients as tensors, so sums would be divided and copied to new memory
//! first. A fused one needs no such copy: it divides block by block, in the cache. It is called by
//! Burn, through types that tell nothing, so what it works on waits in the thread.

use core::cell::{Cell, RefCell};
use core::ops::Range;

use burn::backend::DispatchTensor;
use burn::module::ParamId;
use burn::tensor::Tensor;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::memory::{Real, TakenElements, with_elements};
use crate::reduce::{GradientMeans, SumLocation};

/// Elements that are stepped at once where they go through the cache.
const BLOCK: usize = 1024;

thread_local! {
    /// The number of parameters that the loops have stepped on this thread.
    static STEPPED: Cell<usize> = const { Cell::new(0) };
    static WAITING: RefCell<Option<PendingStep>> = const { RefCell::new(None) };
}

/// The place of a parameter after the step.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(in crate::optim) enum StepOutput {
    /// The place where it was.
    Parameter,
    /// The place of its sums. The tensor stays as it was.
    Sums,
}

/// A step in progress on sums of gradients.
struct PendingStep {
    means: GradientMeans,
    output: StepOutput,
    /// The elements of the parameter that comes next, where its gradient stands for sums.
    next: Option<(ParamId, Range<usize>)>,
    /// Set if the last parameter was written over its sums.
    wrote_sums: bool,
}

/// Runs a step on sums. Gives them back.
pub(in crate::optim) fn step_on<R>(
    means: GradientMeans,
    output: StepOutput,
    step: impl FnOnce() -> R,
) -> (R, GradientMeans) {
    let waiting = PendingStep {
        means,
        output,
        next: None,
        wrote_sums: false,
    };
    let restore = RestorePending(WAITING.replace(Some(waiting)));
    let result = step();
    #[expect(
        clippy::expect_used,
        reason = "it was put there above, and a step within this one has put it back"
    )]
    let waiting = WAITING.take().expect("what the step works on");
    drop(restore);
    (result, waiting.means)
}

/// Puts back what waited before, also after a panic.
struct RestorePending(Option<PendingStep>);

impl Drop for RestorePending {
    fn drop(&mut self) {
        WAITING.replace(self.0.take());
    }
}

/// Steps a parameter whose gradient is the [stand-in](GradientMeans::stand_in) of the sums of these elements. Tells
/// whether it lies in their place then.
///
/// # Panics
///
/// If the optimizer does not take the sums, though it [steps in loops](steps_in_loops), or if there are not
/// as many as elements of the parameter.
pub(in crate::optim) fn step_next<R>(
    id: ParamId,
    elements: Range<usize>,
    step: impl FnOnce() -> R,
) -> (R, bool) {
    with_waiting(|waiting| waiting.next = Some((id, elements)));
    let result = step();
    let outcome = with_waiting(|waiting| (waiting.next.take().is_none(), waiting.wrote_sums));
    let (taken, wrote_sums) = outcome.unwrap_or((true, false));
    assert!(
        taken,
        "expected the fused optimizer that stepped a sample of parameter {id} to step the parameter too"
    );
    (result, wrote_sums)
}

/// Returns `true` if `work` has stepped a parameter in the loops of this module, which can read sums of gradients
/// in place.
pub(in crate::optim) fn steps_in_loops(work: impl FnOnce()) -> bool {
    let before = STEPPED.get();
    work();
    STEPPED.get() > before
}

/// Returns the gradient for Burn's own operations: the mean of the sums that it stands for, or itself.
pub(super) fn gradient<const D: usize>(tensor: &Tensor<D>, gradient: Tensor<D>) -> Tensor<D> {
    let part = with_waiting(|waiting| {
        let (id, elements) = waiting.next.take()?;
        waiting.wrote_sums = false;
        waiting.means.part(id, &elements, &tensor.dims())
    });
    part.flatten().map_or(gradient, Tensor::from_dispatch)
}

/// A loop over elements of a parameter, their gradients, and which ones they are.
type StepLoop<'a, E> = &'a mut dyn FnMut(&mut [E], &[E], Range<usize>);

/// Gives `work` the elements of a parameter, their gradients, and which ones they are: all at once, or
/// block by block. It steps them.
pub(super) fn step<E: Real>(
    tensor: DispatchTensor,
    gradient: DispatchTensor,
    work: StepLoop<'_, E>,
) -> DispatchTensor {
    STEPPED.set(STEPPED.get() + 1);
    let next = with_waiting(|waiting| waiting.next.take()).flatten();
    let Some((id, elements)) = next else {
        let mut parameters = TakenElements::<E>::from(tensor);
        let gradients = TakenElements::<E>::from(gradient);
        let length = gradients.slice().len();
        work(parameters.slice_mut(), gradients.slice(), 0..length);
        return parameters.into_tensor();
    };
    let stepped = with_waiting(|waiting| {
        waiting.wrote_sums = waiting.output == StepOutput::Sums;
        let SumLocation { sums, scale } = waiting.means.place::<E>(id, &elements)?;
        let mut gradients = [E::ZERO; BLOCK];
        let mut start = 0;
        if waiting.wrote_sums {
            let mut parameters = [E::ZERO; BLOCK];
            with_elements(&tensor, |from: &[E]| {
                assert_eq!(from.len(), sums.len(), "elements of parameter {id}");
                for (sums, from) in sums.chunks_mut(BLOCK).zip(from.chunks(BLOCK)) {
                    let (p, g) = (&mut parameters[..sums.len()], &mut gradients[..sums.len()]);
                    scale.write(sums, g);
                    p.copy_from_slice(from);
                    work(p, g, start..start + sums.len());
                    sums.copy_from_slice(p);
                    start += sums.len();
                }
            });
            return Some(tensor);
        }
        let mut parameters = TakenElements::<E>::from(tensor);
        let all = parameters.slice_mut();
        assert_eq!(all.len(), sums.len(), "elements of parameter {id}");
        for (sums, p) in sums.chunks(BLOCK).zip(all.chunks_mut(BLOCK)) {
            let g = &mut gradients[..sums.len()];
            scale.write(sums, g);
            work(p, g, start..start + sums.len());
            start += sums.len();
        }
        Some(parameters.into_tensor())
    });
    #[expect(
        clippy::expect_used,
        reason = "who has a stand-in has a gradient, and sums are of the type of a parameter that is f32 or f64"
    )]
    stepped.flatten().expect("sums of this type")
}

/// Returns the settings of a Burn configuration, whose fields are private: only serde can read them.
///
/// `None` if a field has another name or type than expected: Burn's own operations are right then.
pub(super) fn settings<S: DeserializeOwned>(config: &impl Serialize) -> Option<S> {
    let told = serde_json::to_value(config).ok()?;
    serde_json::from_value(told).ok()
}

fn with_waiting<R>(work: impl FnOnce(&mut PendingStep) -> R) -> Option<R> {
    WAITING.with_borrow_mut(|waiting| waiting.as_mut().map(work))
}
