//! A block as one operation of the graph, which runs the block again in backward.

use core::cell::{Cell, RefCell};
use core::fmt;
use core::mem::take;
use std::sync::Arc;

use accelerator_host::sync::Mutex;
use burn::backend::DispatchTensor;
use burn::backend::autodiff::NodeId;
use burn::module::{Flag, Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{Device, Tensor};

use crate::core::autodiff::{Node, NodeContext, above, above_both, tracked_node};
use crate::core::draws::{self, drawing};
use crate::core::dyn_module::BoxedModule;
use crate::core::tensor::any_rank;
use crate::core::tensors::{Tensors, map_floats};
use crate::model::running_states;
use crate::timeline::{Phase, Timeline};

/// Runs `forward` on a block of a model and keeps only its inputs; backward runs it again, as PyTorch's
/// `torch.utils.checkpoint` does. A [`Unit`](super::Unit) does the same with
/// [`Units::Recompute`](super::Units::Recompute).
///
/// Inputs and outputs are tensors of any kind, alone or in tuples, arrays, vectors and options. Gradients are
/// bit-identical to those of plain Burn, unless a parameter is used in several blocks: then its gradients are summed
/// block by block. Both runs draw the same random numbers; running statistics, such as those of a batch norm, are
/// updated once. Blocks can be nested.
///
/// A parameter that `forward` does not use has no gradient, as in plain Burn; in half precision, its gradient is all
/// zeros.
///
/// Ranks that are threads of one process share one random number generator. While one of them runs a block, the
/// others must not draw random numbers outside of blocks.
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
/// Panics if `forward` panics in either run, or if it captures a tensor that is part of the graph. Pass such a tensor
/// in `input`; otherwise, it would get no gradient.
pub fn recompute<M, I, O>(block: &M, input: I, forward: impl Fn(&M, I) -> O + Send + 'static) -> O
where
    M: Module + 'static,
    I: Tensors + Clone + Send + 'static,
    O: Tensors + 'static,
{
    let mut cut = Cut::default();
    let input = map_floats(input, &mut |tensor| cut.input(tensor));
    // Parameters become untracked but stay on an autodiff device, which Dropout and BatchNorm look at.
    let block = cut.block(BoxedModule::new(block.clone()));
    let statistics = cut.statistics;
    let block = block.into_model::<M>();
    let Some(seeded) = cut.seeded() else {
        return forward(&block, input);
    };
    let output = seeded.run(|| forward(&block, input.clone()));
    let Some(replay) = cut.into_replay(seeded) else {
        return output;
    };
    let mut outputs = replay.place(Box::new(move |leaves| {
        let block = BoxedModule::new(block);
        let block = match statistics {
            Statistics::None => block,
            Statistics::Running => with_own_statistics(block),
        };
        let block = leaves.block(block).into_model::<M>();
        let input = map_floats(input, &mut |tensor| leaves.input(tensor));
        let mut outputs = Vec::new();
        map_floats(forward(&block, input), &mut |tensor| {
            outputs.push(tensor.clone());
            tensor
        });
        outputs
    }));
    map_floats(output, &mut |values| outputs.next(values))
}

/// Returns `true` within a block that will run again in backward, or is running again now.
pub(crate) fn is_recomputed() -> bool {
    RECOMPUTED.get()
}

/// Records the time of the blocks that this thread runs again, for as long as the guard lives.
pub(crate) fn timed(timeline: &Timeline) -> impl Drop + use<> {
    struct Restore(Option<Timeline>);
    impl Drop for Restore {
        fn drop(&mut self) {
            TIMELINE.set(self.0.take());
        }
    }
    Restore(TIMELINE.replace(Some(timeline.clone())))
}

thread_local! {
    static TIMELINE: RefCell<Option<Timeline>> = const { RefCell::new(None) };
    static RECOMPUTED: Cell<bool> = const { Cell::new(false) };
}

/// The cut between a block and the graph: the tensors that enter the block, each taken out of the graph.
#[derive(Default)]
struct Cut {
    /// The device of the tensors.
    device: Option<Device>,
    parents: Vec<DispatchTensor>,
    targets: Targets,
    statistics: Statistics,
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

/// The statistics of a block that change when it runs.
#[derive(Clone, Copy, Default)]
enum Statistics {
    #[default]
    None,
    Running,
}

impl Cut {
    fn input(&mut self, tensor: DispatchTensor) -> DispatchTensor {
        let target = self.target(&tensor);
        self.targets.inputs.push(target);
        untracked(tensor)
    }

    fn block(&mut self, block: BoxedModule) -> BoxedModule {
        let block = block.map(self);
        // Statistics are never tracked and few parameters are untracked, so only blocks with untracked ones are
        // searched.
        if self.targets.parameters.iter().any(Option::is_none) && !running_states(&block).is_empty()
        {
            self.statistics = Statistics::Running;
        }
        block
    }

    fn target(&mut self, tensor: &DispatchTensor) -> Option<Target> {
        // An input may be on the device without autodiff.
        if !self.device.as_ref().is_some_and(Device::is_autodiff) {
            self.device = Some(any_rank(tensor).device());
        }
        let node = tracked_node(tensor)?;
        self.parents.push(tensor.clone());
        let kind = match any_rank(tensor).is_require_grad() {
            true => TargetKind::Leaf,
            false => TargetKind::Inner,
        };
        Some(Target { node, kind })
    }

    /// The seeded run of the block; `None` without autodiff, because nothing is drawn or kept then.
    fn seeded(&self) -> Option<SeededRun> {
        let device = self.device.clone().filter(Device::is_autodiff)?;
        Some(SeededRun {
            seed: draws::next_unit_seed(),
            device,
        })
    }

    /// The block, ready to become an operation of the graph; `None` if nothing needs a gradient.
    fn into_replay(self, run: SeededRun) -> Option<Replay> {
        let token = Tensor::<1>::zeros([1], &run.device).into_dispatch();
        let below = self
            .parents
            .into_iter()
            .reduce(|all, parent| above_both([all, parent], token.clone(), Arc::new(Tie)))?;
        Some(Replay {
            below,
            targets: self.targets,
            run,
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
type Again = Box<dyn FnOnce(&mut BlockLeaves<'_>) -> Vec<DispatchTensor> + Send>;

/// A block that is to become an operation of the graph.
struct Replay {
    /// Tied to all tensors that enter the block.
    below: DispatchTensor,
    targets: Targets,
    run: SeededRun,
    /// A placeholder for the value of nodes that have none.
    token: DispatchTensor,
}

impl Replay {
    /// Places the block in the graph.
    fn place(self, again: Again) -> Outputs {
        let gradients = Arc::new(Mutex::new(Vec::new()));
        let node = BlockNode {
            again: Mutex::new(Some(again)),
            gradients: gradients.clone(),
            targets: self.targets,
            run: self.run,
            token: self.token.clone(),
        };
        Outputs {
            block: above(self.below, self.token, Arc::new(node)),
            gradients,
        }
    }
}

/// A run of a block, which draws the same numbers each time.
struct SeededRun {
    seed: u64,
    device: Device,
}

impl SeededRun {
    fn run<T>(&self, block: impl FnOnce() -> T) -> T {
        struct Restore(bool);
        impl Drop for Restore {
            fn drop(&mut self) {
                RECOMPUTED.set(self.0);
            }
        }
        let _restore = Restore(RECOMPUTED.replace(true));
        // Another rank of this process may draw from the generator, too.
        let _turn = drawing();
        draws::in_unit(self.seed, &self.device, block)
    }
}

/// The gradients of a block's outputs; `None` for an output that the loss does not depend on.
type OutputGradients = Arc<Mutex<Vec<Option<DispatchTensor>>>>;

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
        gradients.push(None);
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
        self.gradients.lock()[self.place] = Some(here.take());
    }
}

/// The operation of a block. Backward reaches it after all outputs that the loss depends on.
struct BlockNode {
    again: Mutex<Option<Again>>,
    gradients: OutputGradients,
    targets: Targets,
    run: SeededRun,
    token: DispatchTensor,
}

impl Node for BlockNode {
    fn backward(&self, here: &mut dyn NodeContext) {
        let Some(again) = self.again.lock().take() else {
            return;
        };
        let timeline = TIMELINE.with_borrow(Clone::clone);
        let recomputing = timeline
            .as_ref()
            .map(|timeline| timeline.span(Phase::Recompute));
        let mut leaves = BlockLeaves::new(&self.targets);
        let outputs = self.run.run(|| again(&mut leaves));
        drop(recomputing);
        let BlockLeaves {
            inputs, parameters, ..
        } = leaves;
        let mut gradients = self.backward_from(outputs);
        for (targets, leaves) in [
            (&self.targets.parameters, parameters),
            (&self.targets.inputs, inputs),
        ] {
            for (target, leaf) in targets.iter().zip(leaves) {
                let (Some(target), Some(leaf)) = (target, leaf) else {
                    continue;
                };
                let leaf = any_rank(&leaf);
                let gradient = gradients
                    .as_mut()
                    .and_then(|gradients| leaf.grad_remove(gradients));
                let gradient = match (gradient, target.kind) {
                    (None, TargetKind::Inner) => Some(leaf.inner().zeros_like()),
                    (gradient, _) => gradient,
                };
                if let Some(gradient) = gradient {
                    here.give(target.node, gradient.into_dispatch());
                }
            }
        }
    }
}

impl BlockNode {
    /// Runs backward in the block's own graph, from the gradients of its outputs. Returns `None` if no output depends
    /// on a leaf.
    fn backward_from(&self, outputs: Vec<DispatchTensor>) -> Option<burn::tensor::Gradients> {
        let gradients = take(&mut *self.gradients.lock());
        let seeds = outputs.into_iter().zip(gradients);
        let seeds = seeds.filter_map(|(output, gradient)| {
            let seed = SeedNode {
                output: tracked_node(&output)?,
                gradient: Mutex::new(Some(gradient?)),
            };
            Some(above(output, self.token.clone(), Arc::new(seed)))
        });
        let root =
            seeds.reduce(|all, seed| above_both([all, seed], self.token.clone(), Arc::new(Tie)))?;
        Some(any_rank(&root).backward())
    }
}

/// Starts a backward pass from a given gradient.
struct SeedNode {
    output: NodeId,
    gradient: Mutex<Option<DispatchTensor>>,
}

impl Node for SeedNode {
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
}

impl<'a> BlockLeaves<'a> {
    fn new(targets: &'a Targets) -> Self {
        Self {
            targets,
            inputs: Vec::new(),
            parameters: Vec::new(),
        }
    }

    fn input(&mut self, tensor: DispatchTensor) -> DispatchTensor {
        let target = self.targets.inputs[self.inputs.len()];
        let leaf = target.map(|_| any_rank(&tensor).require_grad().into_dispatch());
        self.inputs.push(leaf.clone());
        leaf.unwrap_or(tensor)
    }

    fn block(&mut self, block: BoxedModule) -> BoxedModule {
        block.map(self)
    }
}

impl ModuleMapper for BlockLeaves<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let target = self.targets.parameters[self.parameters.len()];
        let (id, value, mapper) = param.consume();
        let value = value.set_require_grad(target.is_some());
        let leaf = target.map(|_| value.clone().into_dispatch());
        self.parameters.push(leaf);
        Param::from_mapped_value(id, value, mapper)
    }
}

/// Returns the same values on the same device, outside of any graph.
fn untracked(tensor: DispatchTensor) -> DispatchTensor {
    Tensor::<1>::from_dispatch(tensor)
        .set_require_grad(false)
        .into_dispatch()
}

/// Returns the block with its own copies of the statistics, so that its second run leaves those of the model
/// unchanged.
fn with_own_statistics(block: BoxedModule) -> BoxedModule {
    let mut kept = Kept::default();
    block.visit(&mut kept);
    kept.floats.reverse();
    kept.flags.reverse();
    // Clones share running statistics, but `valid` copies them. The two calls also change flags, and the
    // checkpointing strategy that tensors get from their device; `kept` restores both.
    block.valid().train().map(&mut kept)
}

/// The floats and flags of a block, in reverse order.
#[derive(Default)]
struct Kept {
    floats: Vec<DispatchTensor>,
    flags: Vec<Param<Flag>>,
}

impl ModuleVisitor for Kept {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.floats.push(param.base().into_dispatch());
    }

    fn visit_flag(&mut self, flag: &Param<Flag>) {
        self.flags.push(flag.clone());
    }
}

impl ModuleMapper for Kept {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, value, mapper) = param.consume();
        let value = self.floats.pop().map_or(value, Tensor::from_dispatch);
        Param::from_mapped_value(id, value, mapper)
    }

    fn map_flag(&mut self, flag: Param<Flag>) -> Param<Flag> {
        self.flags.pop().unwrap_or(flag)
    }
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

impl fmt::Debug for SeedNode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SeedNode")
    }
}
