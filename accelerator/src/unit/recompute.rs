//! A block as one operation of the graph, which runs the block again in backward.

use core::cell::RefCell;
use core::fmt;
use core::mem::take;
use std::sync::Arc;

use accelerator_host::sync::Mutex;
use burn::backend::DispatchTensor;
use burn::backend::autodiff::NodeId;
use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::tensor::{DType, Device, Shape, Tensor};

use super::seeded_run::SeededRun;
use super::sharding::{self, BlockGradient, Pass, Sharding};
use super::statistics::Statistics;
use crate::context::Context;
use crate::core::autodiff::{Node, NodeContext, above, above_both, tracked_node};
use crate::core::draws;
use crate::core::dyn_module::BoxedModule;
use crate::core::error::Error;
use crate::core::scoped::Scoped;
use crate::core::tensor::any_rank;
use crate::core::tensors::{Tensors, map_floats};
use crate::timeline::{Phase, Timeline};

/// Runs `forward` on a block of a model and keeps only its inputs; backward runs it again, as PyTorch's
/// `torch.utils.checkpoint` does. A [`Unit`](super::Unit) does the same with
/// [`Units::Recompute`](super::Units::Recompute).
///
/// Inputs and outputs are tensors of any kind, alone or in tuples, arrays, vectors and options. Gradients are
/// bit-identical to those of plain Burn, unless a tensor is used several times, and not in one block alone: the gradients
/// of a block's uses are summed first. Running statistics, such as those of a batch norm, are updated once. Blocks can be
/// nested.
///
/// A parameter that `forward` does not use has no gradient, as in plain Burn. A tensor that is computed from others, such
/// as an input or a parameter in half precision, gets a gradient of zeros.
///
/// Both runs draw the same random numbers: the block seeds the generator of its device, in a program without an
/// accelerator with a number that it draws. Ranks that are threads of one process share one generator. While one of
/// them runs a block, the others must not draw random numbers outside of blocks; and a block must not wait for them.
///
/// ```
/// use accelerator::nn::recompute;
/// use burn::nn::{Linear, LinearConfig};
/// use burn::tensor::{Device, Distribution, Tensor, activation};
///
/// let device = Device::default().autodiff();
/// let mlp: [Linear; 2] = [
///     LinearConfig::new(3, 64).init(&device),
///     LinearConfig::new(64, 1).init(&device),
/// ];
/// let x = Tensor::<2>::random([8, 3], Distribution::Default, &device);
/// let y = recompute(&mlp, x, |[hidden, output], x| {
///     output.forward(activation::gelu(hidden.forward(x)))
/// });
/// let gradients = y.mean().backward();
/// assert!(mlp[0].weight.val().grad(&gradients).is_some());
/// ```
///
/// # Panics
///
/// Panics if `forward` panics in either run, if it returns other shapes in the second one, or if an output depends on a
/// captured tensor that is part of the graph. Pass such a tensor in `input`; otherwise, it would get no gradient.
///
/// `forward` must not compute with such a tensor at all, not even to detach the result: the second run would wait for
/// the backward pass that it is part of, forever. Detach the tensor outside of the closure.
pub fn recompute<M, I, O>(block: &M, input: I, forward: impl Fn(&M, I) -> O + Send + 'static) -> O
where
    M: Module + 'static,
    I: Tensors + Clone + Send + 'static,
    O: Tensors + 'static,
{
    run(block, None, input, forward)
}

/// Runs a unit as [`recompute`] does. If its parameters are sharded, they are whole only while it runs.
pub(super) fn run<M, I, O>(
    block: &M,
    sharding: Option<Arc<Sharding>>,
    input: I,
    forward: impl Fn(&M, I) -> O + Send + 'static,
) -> O
where
    M: Module + 'static,
    I: Tensors + Clone + Send + 'static,
    O: Tensors + 'static,
{
    let mut cut = Cut::default();
    let free_input = map_floats(input.clone(), &mut |tensor| cut.input(tensor));
    // Parameters become untracked but stay on an autodiff device, which Dropout and BatchNorm look at.
    let free_block = BoxedModule::new(block.clone()).map(&mut cut);
    let Some(seeded) = cut.seeded() else {
        return match sharding {
            Some(sharding) => forward(&cut.whole(&sharding, free_block).into_model(), input),
            None => forward(block, input),
        };
    };
    drop(input);
    let statistics = cut.statistics(&free_block);
    let input = free_input;
    let (free_block, output) = match &sharding {
        Some(sharding) => {
            // Other ranks, which may be threads of this process, take part: none of them may hold the generator.
            let whole = sharding
                .gather(free_block.clone(), Pass::Forward)
                .into_model();
            (free_block, seeded.run(|| forward(&whole, input.clone())))
        }
        None => {
            let block = free_block.into_model();
            let output = seeded.run(|| forward(&block, input.clone()));
            (BoxedModule::new(block), output)
        }
    };
    let Some(recomputation) = cut.into_recomputation(seeded, sharding) else {
        return output;
    };
    let mut outputs = recomputation.place(
        free_block,
        Box::new(move |block, leaves| {
            let run = || {
                let block = block.map(leaves).into_model::<M>();
                let input = map_floats(input, &mut |tensor| leaves.input(tensor));
                let mut outputs = Vec::new();
                map_floats(forward(&block, input), &mut |tensor| {
                    outputs.push(tensor.clone());
                    tensor
                });
                outputs
            };
            match &statistics {
                Some(statistics) => statistics.again(run),
                None => run(),
            }
        }),
    );
    map_floats(output, &mut |values| outputs.next(values))
}

/// Begins the backward pass of a micro-step with this weight. When the guard is dropped, the pass ends: the time spent on
/// recomputation is recorded, and the generator is seeded again, so that later draws do not depend on recomputed blocks.
pub(crate) fn backward_begins(context: &Context, weight: f64) -> impl Drop + use<'_> {
    struct End<'a>(
        &'a Context,
        Option<Timeline>,
        #[expect(dead_code)] Scoped<Option<f64>>,
    );
    impl Drop for End<'_> {
        fn drop(&mut self) {
            TIMELINE.set(self.1.take());
            draws::seed_after_backward(&self.0.device);
        }
    }
    let timeline = TIMELINE.replace(Some(context.timeline.clone()));
    End(context, timeline, sharding::weigh(weight))
}

thread_local! {
    static TIMELINE: RefCell<Option<Timeline>> = const { RefCell::new(None) };
}

/// The cut between a block and the graph: the tensors that enter the block, each taken out of the graph.
#[derive(Default)]
struct Cut {
    /// The device of the tensors.
    device: Option<Device>,
    /// Set if a tensor is in the graph of a backend that this crate was not built for.
    is_foreign: bool,
    parents: Vec<DispatchTensor>,
    targets: Targets,
}

/// The receivers of gradients, in the order of the float tensors in the input and in the block; `None` for an
/// untracked tensor.
#[derive(Default)]
struct Targets {
    inputs: Vec<Option<Target>>,
    parameters: Vec<Option<Target>>,
}

#[derive(Clone, Copy)]
struct Target {
    node: NodeId,
    kind: TargetKind,
}

#[derive(Clone, Copy)]
enum TargetKind {
    Leaf,
    /// Backward reaches it after the block and takes its gradient, which must exist, even if it is all zeros.
    Inner,
}

impl Cut {
    fn input(&mut self, tensor: DispatchTensor) -> DispatchTensor {
        let target = self.target(&tensor);
        self.targets.inputs.push(target);
        untracked(tensor)
    }

    fn target(&mut self, tensor: &DispatchTensor) -> Option<Target> {
        // An input may be on the device without autodiff.
        if !self.device.as_ref().is_some_and(Device::is_autodiff) {
            self.device = Some(any_rank(tensor).device());
        }
        let Some(node) = tracked_node(tensor) else {
            self.is_foreign |= any_rank(tensor).is_tracked();
            return None;
        };
        self.parents.push(tensor.clone());
        let kind = match any_rank(tensor).is_require_grad() {
            true => TargetKind::Leaf,
            false => TargetKind::Inner,
        };
        Some(Target { node, kind })
    }

    /// The seeded run of the block; `None` if the block runs as it is: without autodiff, nothing is drawn or kept.
    fn seeded(&self) -> Option<SeededRun> {
        let device = self.device.clone().filter(Device::is_autodiff)?;
        if self.is_foreign {
            return None;
        }
        Some(SeededRun::next(device))
    }

    /// The statistics that the block updates. They are untracked, as few parameters are, so that most blocks need not be
    /// searched.
    fn statistics(&self, block: &BoxedModule) -> Option<Statistics> {
        let mut targets = self.targets.parameters.iter();
        targets
            .any(Option::is_none)
            .then(|| Statistics::of(block))?
    }

    /// Returns the block with whole parameters, detached from the graph.
    fn whole(&self, sharding: &Sharding, block: BoxedModule) -> BoxedModule {
        if self.is_foreign {
            sharding.refuse(Error::misuse(
                "a sharded unit runs on a backend that this library was not built for, so its parameters would get no \
                 gradients: enable the feature of `burn-accelerate` for that backend",
            ));
        }
        sharding.gather(block, Pass::Forward)
    }

    /// The block, ready to become an operation of the graph; `None` if nothing needs a gradient.
    fn into_recomputation(
        self,
        run: SeededRun,
        sharding: Option<Arc<Sharding>>,
    ) -> Option<Recomputation> {
        let token = Tensor::<1>::zeros([1], &run.device).into_dispatch();
        let below = self
            .parents
            .into_iter()
            .reduce(|all, parent| above_both([all, parent], token.clone(), Arc::new(Tie)))?;
        Some(Recomputation {
            below,
            targets: self.targets,
            run,
            sharding,
            token,
        })
    }
}

impl ModuleMapper for Cut {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, value, mapper) = param.consume();
        let target = self.target(&value.clone().into_dispatch());
        self.targets.parameters.push(target);
        Param::from_mapped_value(id, value.set_require_grad(false), mapper)
    }
}

/// Makes backward reach both of its parents. It carries no gradient.
#[derive(Debug)]
struct Tie;

impl Node for Tie {
    fn backward(&self, _: &mut dyn NodeContext) {}
}

/// Runs a block again, in a graph of its own, and returns its outputs.
type Again = Box<dyn FnOnce(BoxedModule, &mut BlockLeaves<'_>) -> Vec<DispatchTensor> + Send>;

/// A block that is to become an operation of the graph.
struct Recomputation {
    /// Tied to all tensors that enter the block.
    below: DispatchTensor,
    targets: Targets,
    run: SeededRun,
    sharding: Option<Arc<Sharding>>,
    /// A placeholder for the value of nodes that have none.
    token: DispatchTensor,
}

impl Recomputation {
    /// Places the block in the graph, which is to run again.
    fn place(self, block: BoxedModule, again: Again) -> Outputs {
        let gradients = Arc::new(Mutex::new(Vec::new()));
        let node = BlockNode {
            again: Mutex::new(Some((block, again))),
            gradients: gradients.clone(),
            targets: self.targets,
            run: self.run,
            sharding: self.sharding,
            token: self.token.clone(),
        };
        Outputs {
            block: above(self.below, self.token, Arc::new(node)),
            gradients,
        }
    }
}

/// The gradients of a block's outputs, which the block's node reads.
type OutputGradients = Arc<Mutex<Vec<OutputGradient>>>;

struct OutputGradient {
    shape: Shape,
    dtype: DType,
    /// `None` for an output that the loss does not depend on.
    gradient: Option<DispatchTensor>,
}

/// Places the outputs of a block in the graph, one after the other.
struct Outputs {
    block: DispatchTensor,
    gradients: OutputGradients,
}

impl Outputs {
    fn next(&mut self, values: DispatchTensor) -> DispatchTensor {
        assert!(
            tracked_node(&values).is_none(),
            "the closure of a recomputed block captures a tensor that is part of the graph and would get no gradient: \
             pass it in the block's input"
        );
        let mut gradients = self.gradients.lock();
        let place = gradients.len();
        gradients.push(OutputGradient {
            shape: any_rank(&values).shape(),
            dtype: any_rank(&values).dtype(),
            gradient: None,
        });
        let output = OutputNode {
            gradients: self.gradients.clone(),
            place,
        };
        above(self.block.clone(), values, Arc::new(output))
    }
}

/// Keeps the gradient of an output for the block.
struct OutputNode {
    gradients: OutputGradients,
    place: usize,
}

impl Node for OutputNode {
    fn backward(&self, here: &mut dyn NodeContext) {
        self.gradients.lock()[self.place].gradient = Some(here.take());
    }
}

/// The operation of a block. Backward reaches it after all outputs that the loss depends on.
struct BlockNode {
    again: Mutex<Option<(BoxedModule, Again)>>,
    gradients: OutputGradients,
    targets: Targets,
    run: SeededRun,
    sharding: Option<Arc<Sharding>>,
    token: DispatchTensor,
}

impl Node for BlockNode {
    fn backward(&self, here: &mut dyn NodeContext) {
        let Some((block, again)) = self.again.lock().take() else {
            return;
        };
        let block = match &self.sharding {
            Some(sharding) => sharding.gather(block, Pass::Backward),
            None => block,
        };
        let timeline = TIMELINE.with_borrow(Clone::clone);
        let recomputing = timeline
            .as_ref()
            .map(|timeline| timeline.span(Phase::Recompute));
        let mut leaves = BlockLeaves::new(&self.targets);
        let outputs = self.run.run(|| again(block, &mut leaves));
        drop(recomputing);
        let BlockLeaves {
            inputs,
            parameters,
            ids,
            ..
        } = leaves;
        let mut gradients = self.backward_from(outputs);
        let mut take_all = |leaves: &[Option<DispatchTensor>]| -> Vec<Option<DispatchTensor>> {
            let take = |leaf: &Option<DispatchTensor>| {
                let gradient = any_rank(leaf.as_ref()?).grad_remove(gradients.as_mut()?);
                gradient.map(Tensor::into_dispatch)
            };
            leaves.iter().map(take).collect()
        };
        let (of_parameters, of_inputs) = (take_all(&parameters), take_all(&inputs));
        let of_parameters = match &self.sharding {
            Some(sharding) => {
                let whole = ids.iter().zip(&parameters).zip(of_parameters);
                let whole = whole.map(|((id, leaf), gradient)| {
                    let (id, leaf) = (*id, leaf.clone()?);
                    Some(BlockGradient { id, leaf, gradient })
                });
                sharding.scatter(whole.collect())
            }
            None => of_parameters,
        };
        let zeros = |leaf: &DispatchTensor| any_rank(leaf).inner().zeros_like().into_dispatch();
        give(here, &self.targets.parameters, of_parameters, |place| {
            let leaf = parameters[place].as_ref()?;
            Some(match &self.sharding {
                Some(sharding) => sharding.zeros(ids[place], leaf),
                None => zeros(leaf),
            })
        });
        give(here, &self.targets.inputs, of_inputs, |place| {
            inputs[place].as_ref().map(zeros)
        });
    }
}

/// Gives each target its gradient, or zeros if it must have one.
fn give(
    here: &mut dyn NodeContext,
    targets: &[Option<Target>],
    gradients: Vec<Option<DispatchTensor>>,
    zeros: impl Fn(usize) -> Option<DispatchTensor>,
) {
    for (place, (target, gradient)) in targets.iter().zip(gradients).enumerate() {
        let Some(target) = target else {
            continue;
        };
        let gradient = gradient.or_else(|| match target.kind {
            TargetKind::Inner => zeros(place),
            TargetKind::Leaf => None,
        });
        if let Some(gradient) = gradient {
            here.give(target.node, gradient);
        }
    }
}

impl BlockNode {
    /// Runs backward in the block's own graph, from the gradients of its outputs. Returns `None` if no output depends
    /// on a leaf.
    fn backward_from(&self, outputs: Vec<DispatchTensor>) -> Option<burn::tensor::Gradients> {
        let gradients = take(&mut *self.gradients.lock());
        let is_same = |(output, first): (&DispatchTensor, &OutputGradient)| {
            let output = any_rank(output);
            (output.shape(), output.dtype()) == (first.shape.clone(), first.dtype)
        };
        assert!(
            outputs.len() == gradients.len() && outputs.iter().zip(&gradients).all(is_same),
            "the closure of a recomputed block has returned other outputs in its second run: it must compute the same \
             each time"
        );
        let starts = outputs.into_iter().zip(gradients);
        let starts = starts.filter_map(|(output, first)| {
            let start = StartNode {
                output: tracked_node(&output)?,
                gradient: Mutex::new(Some(first.gradient?)),
            };
            Some(above(output, self.token.clone(), Arc::new(start)))
        });
        let root = starts
            .reduce(|all, start| above_both([all, start], self.token.clone(), Arc::new(Tie)))?;
        Some(any_rank(&root).backward())
    }
}

/// Starts a backward pass from a given gradient.
struct StartNode {
    output: NodeId,
    gradient: Mutex<Option<DispatchTensor>>,
}

impl Node for StartNode {
    fn backward(&self, here: &mut dyn NodeContext) {
        if let Some(gradient) = self.gradient.lock().take() {
            here.give(self.output, gradient);
        }
    }
}

/// The leaves of a block's own graph, in the order of their targets.
struct BlockLeaves<'a> {
    targets: &'a Targets,
    inputs: Vec<Option<DispatchTensor>>,
    parameters: Vec<Option<DispatchTensor>>,
    /// The ids of the parameters.
    ids: Vec<ParamId>,
}

impl<'a> BlockLeaves<'a> {
    fn new(targets: &'a Targets) -> Self {
        Self {
            targets,
            inputs: Vec::new(),
            parameters: Vec::new(),
            ids: Vec::new(),
        }
    }

    fn input(&mut self, tensor: DispatchTensor) -> DispatchTensor {
        let target = self.targets.inputs[self.inputs.len()];
        let leaf = target.map(|_| any_rank(&tensor).require_grad().into_dispatch());
        self.inputs.push(leaf.clone());
        leaf.unwrap_or(tensor)
    }
}

impl ModuleMapper for BlockLeaves<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let target = self.targets.parameters[self.parameters.len()];
        let (id, value, mapper) = param.consume();
        let value = value.set_require_grad(target.is_some());
        let leaf = target.map(|_| value.clone().into_dispatch());
        self.parameters.push(leaf);
        self.ids.push(id);
        Param::from_mapped_value(id, value, mapper)
    }
}

/// Returns the same values on the same device, outside of any graph.
fn untracked(tensor: DispatchTensor) -> DispatchTensor {
    Tensor::<1>::from_dispatch(tensor)
        .set_require_grad(false)
        .into_dispatch()
}

impl fmt::Debug for BlockNode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("BlockNode")
    }
}

impl fmt::Debug for OutputNode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "OutputNode({})", self.place)
    }
}

impl fmt::Debug for StartNode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("StartNode")
    }
}
