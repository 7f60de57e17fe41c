//! Steps that read sums of gradients where they lie.
//!
//! An optimizer of Burn's takes gradients as tensors, so sums would be divided and copied to new memory
//! first. A fused one needs no such copy: it divides block by block, in the cache. It is called by
//! Burn, through types that tell nothing, so what it works on waits in the thread.

use core::cell::{Cell, RefCell};
use core::ops::{Add, Div, Mul, Range, Sub};

use burn::backend::DispatchTensor;
use burn::module::ParamId;
use burn::optim::StateSource;
use burn::tensor::{DType, Device, Element, Shape, Tensor, TensorData};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::core::offload::{self, in_file};
use crate::core::tensor::{any_rank, from_data};
use crate::reduce::{ElementValues, GradientSums, SumLocation, Summand, with_values};

/// Elements that are stepped at once where they go through the cache.
const BLOCK: usize = 1024;

thread_local! {
    /// The number of parameters that the loops have stepped on this thread.
    static STEPPED: Cell<usize> = const { Cell::new(0) };
    static WAITING: RefCell<Option<PendingStep>> = const { RefCell::new(None) };
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(in crate::optim) enum StepOutput {
    /// The place where it was.
    Parameter,
    /// The place of its sums. The tensor stays as it was.
    Sums,
}

struct PendingStep {
    sums: GradientSums,
    output: StepOutput,
    /// The elements of the parameter that comes next, where its gradient stands for sums.
    next: Option<(ParamId, Range<usize>)>,
    /// Set if the last parameter was written over its sums.
    wrote_sums: bool,
}

/// Runs a step on sums. Gives them back.
pub(in crate::optim) fn step_on<R>(
    sums: GradientSums,
    output: StepOutput,
    step: impl FnOnce() -> R,
) -> (R, GradientSums) {
    let waiting = PendingStep {
        sums,
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
    (result, waiting.sums)
}

/// Puts back what waited before, also after a panic.
struct RestorePending(Option<PendingStep>);

impl Drop for RestorePending {
    fn drop(&mut self) {
        WAITING.replace(self.0.take());
    }
}

/// Steps a parameter whose gradient is the [stand-in](GradientSums::stand_in) of the sums of these elements. Tells
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
        waiting.sums.part(id, &elements, &tensor.dims())
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
        let SumLocation { sums, scale } = waiting.sums.place::<E>(id, &elements)?;
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

/// The numbers that the loops work on. A factor reaches them through `f64`, as in Burn.
pub(super) trait Real:
    Element
    + accelerator_collective::Element
    + Summand
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + PartialOrd
{
    const ZERO: Self;

    fn of(value: f64) -> Self;

    fn root(self) -> Self;

    fn among(values: ElementValues<'_>) -> Option<&[Self]>;
}

impl Real for f32 {
    fn among(values: ElementValues<'_>) -> Option<&[Self]> {
        match values {
            ElementValues::F32(values) => Some(values),
            _ => None,
        }
    }

    const ZERO: Self = 0.0;

    fn of(value: f64) -> Self {
        value as Self
    }

    fn root(self) -> Self {
        self.sqrt()
    }
}

impl Real for f64 {
    fn among(values: ElementValues<'_>) -> Option<&[Self]> {
        match values {
            ElementValues::F64(values) => Some(values),
            _ => None,
        }
    }

    const ZERO: Self = 0.0;

    fn of(value: f64) -> Self {
        value
    }

    fn root(self) -> Self {
        self.sqrt()
    }
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum KernelInput {
    F32,
    F64,
    None,
}

impl KernelInput {
    pub(super) fn of<const D: usize>(tensors: &[&Tensor<D>]) -> Self {
        let Some(dtype) = tensors.first().map(|tensor| tensor.dtype()) else {
            return Self::None;
        };
        let near = |tensor: &&Tensor<D>| {
            tensor.dtype() == dtype && is_plain_memory(&(*tensor).clone().into_dispatch())
        };
        match dtype {
            DType::F32 if tensors.iter().all(near) => Self::F32,
            DType::F64 if tensors.iter().all(near) => Self::F64,
            _ => Self::None,
        }
    }
}

#[cfg(feature = "flex")]
fn is_plain_memory(tensor: &DispatchTensor) -> bool {
    use burn::backend::{BackendTensor, DispatchTensorKind};
    matches!(
        tensor.kind,
        DispatchTensorKind::Flex(BackendTensor::Float(_))
    )
}

#[cfg(not(feature = "flex"))]
fn is_plain_memory(_tensor: &DispatchTensor) -> bool {
    false
}

/// The elements of a tensor, taken out of it: moved if nobody else holds them, and copied else.
pub(super) struct TakenElements<E> {
    data: TensorData,
    device: Device,
    _elements: core::marker::PhantomData<E>,
}

impl<E: Real> TakenElements<E> {
    pub(super) fn from(tensor: DispatchTensor) -> Self {
        let tensor = Tensor::<1>::from_dispatch(tensor);
        let device = tensor.device();
        let mut data = tensor.into_data();
        if data.as_mut_slice::<E>().is_err() {
            // A view into a file, which lies anywhere in memory.
            let shape = data.shape().clone();
            data = TensorData::new(data.iter::<E>().collect::<Vec<E>>(), shape);
        }
        Self::of(data, device)
    }

    fn of(data: TensorData, device: Device) -> Self {
        Self {
            data,
            device,
            _elements: core::marker::PhantomData,
        }
    }

    #[expect(clippy::expect_used, reason = "`from` makes data of this type")]
    pub(super) fn slice(&self) -> &[E] {
        self.data.as_slice().expect("elements of this type")
    }

    #[expect(clippy::expect_used, reason = "`from` makes data of this type")]
    pub(super) fn slice_mut(&mut self) -> &mut [E] {
        self.data.as_mut_slice().expect("elements of this type")
    }

    pub(super) fn into_tensor(self) -> DispatchTensor {
        from_data(in_file(self.data), &self.device)
    }
}

/// The shape of a tensor and where it is, for another one.
pub(super) struct TensorTemplate(Shape, Device);

impl TensorTemplate {
    pub(super) fn of(tensor: &DispatchTensor) -> Self {
        let tensor = any_rank(tensor);
        Self(tensor.shape(), tensor.device())
    }

    pub(super) fn cast<E: Real>(&self, elements: Vec<E>) -> DispatchTensor {
        from_data(in_file(TensorData::new(elements, self.0.clone())), &self.1)
    }

    pub(super) fn elements(&self) -> usize {
        self.0.num_elements()
    }
}

/// A tensor of a record, in the float type in which it was saved, if the device has that.
pub(super) fn saved<const D: usize>(
    src: &mut StateSource,
    prefix: &str,
    leaf: &str,
    device: &Device,
) -> Option<Tensor<D>> {
    // Burn loads state on the default device, which may be a GPU.
    let device = &offload::device().unwrap_or_else(|| device.clone());
    let data = in_file(src.take_tensor(prefix, leaf)?);
    let dtype = data.dtype();
    Some(match dtype.is_float() && device.supports_dtype(dtype) {
        true => Tensor::from_data(data, (device, dtype)),
        false => Tensor::from_data(data, device),
    })
}

/// Lets `read` see the elements of a tensor: where they lie, if the device allows it.
pub(super) fn with_elements<E: Real>(tensor: &DispatchTensor, mut read: impl FnMut(&[E])) {
    with_values(core::iter::once((0, tensor)), |_, values| {
        if let Some(values) = E::among(values) {
            read(values);
        }
    });
}

/// The number of elements above which a loop is split between threads.
pub(super) const THREAD_LENGTH: usize = 1 << 15;

// A step on sums works on blocks, and must not call rayon while it holds what waits in the thread.
const _: () = assert!(BLOCK <= THREAD_LENGTH);

/// Runs both closures, in parallel if rayon has more than one thread.
pub(super) fn join(first: impl FnOnce() + Send, second: impl FnOnce() + Send) {
    #[cfg(feature = "flex")]
    if rayon::current_num_threads() > 1 {
        rayon::join(first, second);
        return;
    }
    first();
    second();
}

/// Runs a loop compiled for the widest vectors that the processor has. Bits do not depend on it. Only a closure that is
/// `#[inline(always)]` is compiled so; iterators that zip slices in it may not be.
#[inline(always)]
pub(super) fn vectorised<R>(work: impl FnOnce() -> R) -> R {
    #[cfg(feature = "flex")]
    return macerator::AutoArch::new().dispatch(work);
    #[cfg(not(feature = "flex"))]
    work()
}
