//! Operations of this crate in Burn's graph.

use core::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{
    Autodiff, Backend, BackendTensor, Dispatch, DispatchTensor, DispatchTensorKind, Flex,
    backend_extension,
};
use burn::tensor::{DType, Tensor};
use burn_flex::FlexTensor;

/// An operation on tensors: computes its output, and returns what computes the gradients of its inputs from that of
/// the output.
pub(crate) type Forward<const N: usize> =
    Box<dyn FnOnce([FlexTensor; N]) -> (FlexTensor, Backprop<N>) + Send>;

/// Computes the gradients of the inputs that need one. Gradients of others are ignored.
pub(crate) type Backprop<const N: usize> =
    Box<dyn FnOnce(FlexTensor, [bool; N]) -> [Option<FlexTensor>; N] + Send>;

/// Returns `true` if the tensors are of f32, and on a device with operations of this crate.
fn serves(tensors: &[&DispatchTensor]) -> bool {
    tensors.iter().all(|tensor| {
        let float = match &tensor.kind {
            DispatchTensorKind::Flex(BackendTensor::Float(float)) => float.dtype(),
            DispatchTensorKind::Autodiff(kind) => match &**kind {
                DispatchTensorKind::Flex(BackendTensor::Autodiff(float)) => {
                    float.primitive().dtype()
                }
                _ => return false,
            },
            _ => return false,
        };
        float == DType::F32
    })
}

/// Returns `true` if operations of this crate run on such a tensor.
pub(crate) fn is_served<const D: usize>(tensor: &Tensor<D>) -> bool {
    serves(&[&tensor.clone().into_dispatch()])
}

/// Runs an operation if this crate [`serves`] its input. Only then, the operation is made.
pub(crate) fn one<const D: usize>(
    x: DispatchTensor,
    operation: impl FnOnce() -> Forward<1>,
) -> Option<Tensor<D>> {
    serves(&[&x]).then(|| Tensor::from_dispatch(Dispatch::one(x, operation())))
}

/// The same, of two inputs.
pub(crate) fn two<const D: usize>(
    inputs: [DispatchTensor; 2],
    operation: impl FnOnce() -> Forward<2>,
) -> Option<Tensor<D>> {
    serves(&inputs.each_ref()).then(|| {
        let [x, y] = inputs;
        Tensor::from_dispatch(Dispatch::two(x, y, operation()))
    })
}

/// The same, of three inputs.
pub(crate) fn three<const D: usize>(
    inputs: [DispatchTensor; 3],
    operation: impl FnOnce() -> Forward<3>,
) -> Option<Tensor<D>> {
    serves(&inputs.each_ref()).then(|| {
        let [x, y, z] = inputs;
        Tensor::from_dispatch(Dispatch::three(x, y, z, operation()))
    })
}

/// The same, of four inputs.
pub(crate) fn four<const D: usize>(
    inputs: [DispatchTensor; 4],
    operation: impl FnOnce() -> Forward<4>,
) -> Option<Tensor<D>> {
    serves(&inputs.each_ref()).then(|| {
        let [x, y, z, w] = inputs;
        Tensor::from_dispatch(Dispatch::four(x, y, z, w, operation()))
    })
}

#[backend_extension(Flex, Autodiff)]
trait Operations: Backend {
    fn one(x: FloatTensor<Self>, operation: Forward<1>) -> FloatTensor<Self>;

    fn two(x: FloatTensor<Self>, y: FloatTensor<Self>, operation: Forward<2>) -> FloatTensor<Self>;

    fn three(
        x: FloatTensor<Self>,
        y: FloatTensor<Self>,
        z: FloatTensor<Self>,
        operation: Forward<3>,
    ) -> FloatTensor<Self>;

    fn four(
        x: FloatTensor<Self>,
        y: FloatTensor<Self>,
        z: FloatTensor<Self>,
        w: FloatTensor<Self>,
        operation: Forward<4>,
    ) -> FloatTensor<Self>;
}

impl Operations for Flex {
    fn one(x: FlexTensor, operation: Forward<1>) -> FlexTensor {
        operation([x]).0
    }

    fn two(x: FlexTensor, y: FlexTensor, operation: Forward<2>) -> FlexTensor {
        operation([x, y]).0
    }

    fn three(x: FlexTensor, y: FlexTensor, z: FlexTensor, operation: Forward<3>) -> FlexTensor {
        operation([x, y, z]).0
    }

    fn four(
        x: FlexTensor,
        y: FlexTensor,
        z: FlexTensor,
        w: FlexTensor,
        operation: Forward<4>,
    ) -> FlexTensor {
        operation([x, y, z, w]).0
    }
}

impl<C: CheckpointStrategy> Operations for Autodiff<Flex, C> {
    fn one(x: FloatTensor<Self>, operation: Forward<1>) -> FloatTensor<Self> {
        place::<C, 1>([x], operation)
    }

    fn two(x: FloatTensor<Self>, y: FloatTensor<Self>, operation: Forward<2>) -> FloatTensor<Self> {
        place::<C, 2>([x, y], operation)
    }

    fn three(
        x: FloatTensor<Self>,
        y: FloatTensor<Self>,
        z: FloatTensor<Self>,
        operation: Forward<3>,
    ) -> FloatTensor<Self> {
        place::<C, 3>([x, y, z], operation)
    }

    fn four(
        x: FloatTensor<Self>,
        y: FloatTensor<Self>,
        z: FloatTensor<Self>,
        w: FloatTensor<Self>,
        operation: Forward<4>,
    ) -> FloatTensor<Self> {
        place::<C, 4>([x, y, z, w], operation)
    }
}

fn place<C: CheckpointStrategy, const N: usize>(
    inputs: [FloatTensor<Autodiff<Flex, C>>; N],
    operation: Forward<N>,
) -> FloatTensor<Autodiff<Flex, C>> {
    let values = inputs.each_ref().map(|input| input.primitive().clone());
    let parents = inputs.map(|input| input.into_parts().1);
    let (output, backprop) = operation(values);
    match Backward::<Flex, N>::prepare::<C>(Step, parents)
        .compute_bound()
        .stateful()
    {
        OpsKind::Tracked(prepared) => prepared.finish(State::new(backprop), output),
        OpsKind::UnTracked(prepared) => prepared.finish(output),
    }
}

/// The operation that Burn knows.
#[derive(Debug)]
struct Step;

impl<const N: usize> Backward<Flex, N> for Step {
    type State = State<N>;

    fn backward(self, ops: Ops<Self::State, N>, gradients: &mut Gradients, _: &mut Checkpointer) {
        let gradient = gradients.consume::<Flex>(&ops.node);
        let Some(backprop) = ops.state.take() else {
            unreachable!("Burn consumes a step before it runs it");
        };
        let needs = ops.parents.each_ref().map(Option::is_some);
        for (parent, gradient) in ops.parents.into_iter().zip(backprop(gradient, needs)) {
            if let (Some(parent), Some(gradient)) = (parent, gradient) {
                gradients.register::<Flex>(parent.id, gradient);
            }
        }
    }
}

/// The work that backward does once. Burn asks for a state that can be cloned.
struct State<const N: usize>(Arc<Mutex<Option<Backprop<N>>>>);

impl<const N: usize> State<N> {
    fn new(backprop: Backprop<N>) -> Self {
        Self(Arc::new(Mutex::new(Some(backprop))))
    }

    fn take(&self) -> Option<Backprop<N>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl<const N: usize> Clone for State<N> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<const N: usize> fmt::Debug for State<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("State")
    }
}
