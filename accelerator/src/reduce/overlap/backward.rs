use core::mem::take;
use std::sync::Arc;

use accelerator_collective::ProcessGroup;
use accelerator_host::sync::Mutex;
use burn::backend::{BackendTensor, DispatchTensor, DispatchTensorKind};
use burn::module::{ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;

use super::ready_order::{
    CalibrationOutcome, FlushPoint, ReadyOrder, WindowObservation, flush_points,
};
use super::scheduler::{OverlapScheduler, OverlapState, SchedulerPhase};
use super::{Anchors, Observer, ProbePoint, watch};
use crate::core::autodiff;
use crate::core::dyn_module::DynModule;
use crate::core::error::Result;
use crate::precision::Cast;
use crate::reduce::element_values;
use crate::reduce::model_state::{ModelState, WorkingCopy, WorkingPart};
use crate::reduce::reducer::{ReducedWindow, Reducer, Repair};

/// The number of steps in which a bucket was sent too early before sending early is given up.
const MAX_REPAIRS: u32 = 3;

/// Backward with a reducer that looks on.
impl OverlapScheduler {
    pub(in crate::reduce) fn repair(&self) -> Repair {
        match self.phase {
            SchedulerPhase::Sending(_) => Repair::Possible,
            _ => Repair::Unneeded,
        }
    }

    /// Runs backward. Meanwhile `reducer` sends what is ready, if it is known where to look. Returns what was learnt.
    pub(in crate::reduce) fn backward(
        &mut self,
        loss: Tensor<1>,
        model: &dyn DynModule,
        mut copy: WorkingCopy,
        model_state: &ModelState,
        reducer: Reducer,
    ) -> (GradientsParams, Reducer, Option<WindowObservation>) {
        let served = autodiff::serves(&loss);
        let casts = casts(&copy);
        let watched = match &self.phase {
            // It has nothing to send but zeros, and nothing to learn from.
            _ if reducer.is_idle() => None,
            // What is added up last is ready in the end, and a step that follows may have one copy.
            _ if matches!(copy, WorkingCopy::Several) => None,
            SchedulerPhase::Sending(points) if served => Some((
                ProbeTask::Sending(points.clone()),
                at_points(
                    points,
                    Leaves::of(model, take(&mut copy), model_state),
                    &reducer,
                ),
            )),
            SchedulerPhase::Calibrating(learning) => match learning.observation {
                WindowObservation::Learnt(_) => None,
                _ if !served => {
                    let late =
                        WindowObservation::Learnt(vec![None; model_state.parameters().len()]);
                    let gradients = model.gradients(loss.backward());
                    return (gradients, reducer, Some(late));
                }
                WindowObservation::Depth => Some((ProbeTask::Measuring(0), Vec::new())),
                WindowObservation::Places(depth) => {
                    let probes =
                        everywhere(depth, &Leaves::of(model, take(&mut copy), model_state));
                    let depths = probes.iter().map(|probe| probe.depth).collect();
                    let calibration = Calibration::new(model_state.parameters().len(), depths);
                    Some((ProbeTask::Calibrating(calibration), probes))
                }
            },
            SchedulerPhase::Off(_) | SchedulerPhase::Sending(_) | SchedulerPhase::GivenUp => None,
        };
        let Some((task, probes)) = watched else {
            // Nobody compares what its casts make.
            drop((copy, casts));
            let gradients = model.gradients(loss.backward());
            return (gradients, reducer, None);
        };
        let reducer = match task {
            ProbeTask::Sending(_) => reducer.with_casts(casts.clone()),
            _ => reducer,
        };
        let observer = Arc::new(BackwardObserver(Mutex::new(Some((task, reducer)))));
        let watching: Arc<dyn Observer> = observer.clone();
        let gradients = watch(loss, &mut self.anchors, probes, &watching).backward();
        let gradients = model.gradients(gradients);
        drop(watching);
        let (task, reducer) = observer.close();
        let observation = match task {
            ProbeTask::Measuring(depth) => Some(WindowObservation::Places(depth)),
            ProbeTask::Calibrating(calibration) => Some(WindowObservation::Learnt(
                calibration.result(|index, seen| {
                    let gradient =
                        element_values::peek(&gradients, &model_state.parameters()[index]);
                    let cast = casts.get(index).and_then(Option::as_deref);
                    gradient.is_some_and(|gradient| is_of(seen, &gradient, cast))
                }),
            )),
            ProbeTask::Sending(_) => None,
        };
        (gradients, reducer, observation)
    }

    /// Goes to the next phase after a window was reduced, with what it has taught this rank. All
    /// ranks call it.
    #[track_caller]
    pub(in crate::reduce) fn learn(
        &mut self,
        observation: Option<WindowObservation>,
        reduced: &mut ReducedWindow,
        model_state: &ModelState,
        group: &ProcessGroup,
    ) -> Result<()> {
        self.counts.buckets = reduced.sums.bucket_count();
        self.counts.early = reduced.early;
        if let SchedulerPhase::Sending(_) = self.phase {
            self.counts.early_total += reduced.early as u64;
            self.counts.windows += 1;
        }
        match &mut self.phase {
            SchedulerPhase::Calibrating(learning) => {
                if let Some(observation) = observation {
                    learning.observation = observation;
                }
                let parameters = model_state.parameters().len();
                match learning.agree(parameters, group)? {
                    CalibrationOutcome::NotYet => {}
                    CalibrationOutcome::NothingEarly => {
                        let state = OverlapState::NothingEarly;
                        tracing::info!("overlap is {state} (reported once per model)");
                        self.phase = SchedulerPhase::Off(state);
                    }
                    CalibrationOutcome::Order(order) => {
                        let ready = learning.ready(parameters);
                        self.phase = SchedulerPhase::Sending(lay_out(&order, &ready, model_state)?);
                    }
                }
            }
            SchedulerPhase::Sending(_) if reduced.repaired > 0 => {
                self.counts.repairs += 1;
                if self.counts.repairs >= MAX_REPAIRS {
                    tracing::warn!(
                        step = model_state.steps(),
                        "gradients became ready in another order than before in {MAX_REPAIRS} \
                         steps, and had to be reduced again: from now on, gradients of this model are \
                         sent when backward has ended (reported once per model)"
                    );
                    self.phase = SchedulerPhase::GivenUp;
                    self.anchors = Anchors::default();
                    // No step is undone any more.
                    reduced.sums.drop_undo();
                }
            }
            _ => {}
        }
        Ok(())
    }
}

/// Looks on, and keeps what it learns.
#[derive(Debug)]
enum ProbeTask {
    Measuring(usize),
    Calibrating(Calibration),
    Sending(Vec<FlushPoint>),
}

/// Open while backward runs.
#[derive(Debug)]
struct BackwardObserver(Mutex<Option<(ProbeTask, Reducer)>>);

impl BackwardObserver {
    #[expect(
        clippy::expect_used,
        reason = "nobody else takes it out, and this is called once"
    )]
    fn close(&self) -> (ProbeTask, Reducer) {
        self.0.lock().take().expect("an observer is closed once")
    }
}

impl Observer for BackwardObserver {
    fn begins(&self, depth: usize) {
        if let Some((ProbeTask::Measuring(found), _)) = &mut *self.0.lock() {
            *found = depth;
        }
    }

    fn reached(&self, point: usize, gradients: &mut dyn Iterator<Item = Option<DispatchTensor>>) {
        match &mut *self.0.lock() {
            Some((ProbeTask::Calibrating(calibration), _)) => calibration.observe(point, gradients),
            Some((ProbeTask::Sending(points), reducer)) => {
                for &bucket in &points[point].buckets {
                    // Whatever becomes of one, the next starts at its own.
                    let mut own = (&mut *gradients).take(reducer.members(bucket).len());
                    reducer.complete(bucket, &mut own);
                    own.for_each(drop);
                }
            }
            _ => {}
        }
    }
}

/// Lays the buckets out in that order, and finds where to look on this rank, where gradients are
/// `ready` at these depths.
fn lay_out(
    order: &ReadyOrder,
    ready: &[Option<usize>],
    model_state: &ModelState,
) -> Result<Vec<FlushPoint>> {
    let layout = model_state.lay_out(order)?;
    let late = &order.parameters[order.early..];
    let early: Vec<Vec<usize>> = (0..layout.len())
        .map(|bucket| layout.members(bucket).to_vec())
        .take_while(|members| !members.iter().any(|index| late.contains(index)))
        .collect();
    let points = flush_points(&early, ready);
    tracing::debug!(
        buckets = layout.len(),
        points = points.len(),
        late = late.len(),
        "buckets are sent while backward runs"
    );
    Ok(points)
}

/// Looks at all parameters, at quantiles of the depth.
fn everywhere(depth: usize, leaves: &[Option<DispatchTensor>]) -> Vec<ProbePoint> {
    let depths = depths(depth).into_iter();
    depths
        .map(|depth| ProbePoint {
            depth,
            leaves: leaves.to_vec(),
        })
        .collect()
}

/// Looks at each bucket where it should be complete.
fn at_points(
    points: &[FlushPoint],
    mut leaves: Vec<Option<DispatchTensor>>,
    reducer: &Reducer,
) -> Vec<ProbePoint> {
    points
        .iter()
        .map(|point| ProbePoint {
            depth: point.depth,
            leaves: point
                .buckets
                .iter()
                .flat_map(|&bucket| reducer.members(bucket))
                .map(|&index| take(&mut leaves[index]))
                .collect(),
        })
        .collect()
}

/// Returns for each parameter the cast that makes its gradient of that of its working copy.
fn casts(copy: &WorkingCopy) -> Vec<Option<Arc<Cast>>> {
    match copy {
        WorkingCopy::One(parts) => {
            let cast = |part: &Option<WorkingPart>| part.as_ref()?.cast.clone();
            parts.iter().map(cast).collect()
        }
        WorkingCopy::None | WorkingCopy::Several => Vec::new(),
    }
}

/// A model's parameters, by number.
struct Leaves<'a> {
    found: Vec<Option<DispatchTensor>>,
    model_state: &'a ModelState,
}

impl<'a> Leaves<'a> {
    /// Collects the leaves. Those of a working copy are looked at in its place: their gradients are complete long
    /// before they are cast to the type of the parameter, which is the last that backward does.
    fn of(
        model: &dyn DynModule,
        copy: WorkingCopy,
        model_state: &'a ModelState,
    ) -> Vec<Option<DispatchTensor>> {
        let mut leaves = Leaves {
            found: core::iter::repeat_with(|| None)
                .take(model_state.parameters().len())
                .collect(),
            model_state,
        };
        model.visit(&mut leaves);
        match copy {
            WorkingCopy::None => {}
            WorkingCopy::One(parts) => {
                for (found, part) in leaves.found.iter_mut().zip(parts) {
                    if let (Some(found), Some(part)) = (found, part) {
                        *found = part.tensor;
                    }
                }
            }
            WorkingCopy::Several => leaves.found.fill(None),
        }
        leaves.found
    }
}

impl ModuleVisitor for Leaves<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if !param.is_require_grad() {
            return;
        }
        // All places of a tied parameter are one leaf.
        if let Some(index) = self.model_state.number(param.id) {
            self.found[index] = Some(param.val().into_dispatch());
        }
    }
}

/// The largest number of depths of a backward pass to look at.
pub(super) const POINTS: usize = 64;

/// The depths at which to look, from the deepest to the shallowest, for a loss that is so deep.
pub(super) fn depths(loss: usize) -> Vec<usize> {
    let mut depths: Vec<usize> = (1..=POINTS)
        .rev()
        .map(|k| loss * k / (POINTS + 1))
        .collect();
    depths.dedup();
    depths.retain(|&depth| depth > 0);
    depths
}

/// Finds at which point each gradient is already what it is in the end.
///
/// A gradient that is there need not be complete: a parameter that is used twice gets a sum of
/// two. What was seen is held, and compared by identity.
#[derive(Debug)]
pub(super) struct Calibration {
    depths: Vec<usize>,
    flushed: Vec<Option<ObservedGradient>>,
}

#[derive(Debug)]
struct ObservedGradient {
    gradient: DispatchTensor,
    since: usize,
}

impl Calibration {
    /// Creates a calibration for so many parameters, and points at these depths.
    pub(super) fn new(parameters: usize, depths: Vec<usize>) -> Self {
        Self {
            depths,
            flushed: core::iter::repeat_with(|| None).take(parameters).collect(),
        }
    }

    /// Notes the parameters' gradients at the point of that number. Points come in order.
    pub(super) fn observe(
        &mut self,
        point: usize,
        gradients: impl Iterator<Item = Option<DispatchTensor>>,
    ) {
        for (flushed, gradient) in self.flushed.iter_mut().zip(gradients) {
            *flushed = match (flushed.take(), gradient) {
                (Some(flushed), Some(gradient)) if same(&flushed.gradient, &gradient) => {
                    Some(flushed)
                }
                (_, gradient) => gradient.map(|gradient| ObservedGradient {
                    gradient,
                    since: point,
                }),
            };
        }
    }

    /// The depth of the first point at which each parameter's gradient was the one that it has in
    /// the end, which `is_final` tells; `None` if it was so at no point, or has none.
    pub(super) fn result(
        self,
        is_final: impl Fn(usize, &DispatchTensor) -> bool,
    ) -> Vec<Option<usize>> {
        let depths = self.depths;
        let flushed = self.flushed.into_iter().enumerate();
        flushed
            .map(|(parameter, flushed)| {
                let ObservedGradient { gradient, since } = flushed?;
                is_final(parameter, &gradient).then(|| depths[since])
            })
            .collect()
    }
}

/// Returns `true` if a gradient that was seen is the one that its parameter has in the end, or one in half
/// precision that `cast` has made that of.
pub(in crate::reduce) fn is_of(
    seen: &DispatchTensor,
    gradient: &DispatchTensor,
    cast: Option<&Cast>,
) -> bool {
    match cast {
        Some(cast) => cast.has_made(gradient, seen, same),
        None => same(seen, gradient),
    }
}

/// Returns `true` if two gradients are the same values, because they are the same memory.
///
/// Both must be held when they are compared: nothing is written in place then, and no memory can
/// have been given to somebody else. If a backend cannot tell, they are taken for different.
pub(in crate::reduce) fn same(one: &DispatchTensor, other: &DispatchTensor) -> bool {
    match (&one.kind, &other.kind) {
        #[cfg(feature = "flex")]
        (
            DispatchTensorKind::Flex(BackendTensor::Float(one)),
            DispatchTensorKind::Flex(BackendTensor::Float(other)),
        ) => {
            std::sync::Arc::ptr_eq(&one.data_arc(), &other.data_arc())
                && one.layout() == other.layout()
        }
        #[cfg(feature = "ndarray")]
        (
            DispatchTensorKind::NdArray(BackendTensor::Float(one)),
            DispatchTensorKind::NdArray(BackendTensor::Float(other)),
        ) => ndarray(one).is_some_and(|one| ndarray(other) == Some(one)),
        #[cfg(feature = "cube")]
        (
            DispatchTensorKind::Cube(BackendTensor::Float(one)),
            DispatchTensorKind::Cube(BackendTensor::Float(other)),
        ) => cube::same(one, other),
        _ => false,
    }
}

/// Returns where an array begins, with its shape and strides.
#[cfg(feature = "ndarray")]
#[allow(deprecated, reason = "ndarray is, and is served while it is there")]
fn ndarray(tensor: &burn_ndarray::NdArrayTensor) -> Option<(usize, Vec<usize>, Vec<isize>)> {
    use burn_ndarray::NdArrayTensor as N;
    macro_rules! of {
        ($storage:expr) => {{
            let view = $storage.view();
            Some((
                view.as_ptr() as usize,
                view.shape().to_vec(),
                view.strides().to_vec(),
            ))
        }};
    }
    match tensor {
        N::F64(storage) => of!(storage),
        N::F32(storage) => of!(storage),
        _ => None,
    }
}

#[cfg(feature = "cube")]
mod cube {
    //! Features of other crates decide if Burn fuses operations, so both kinds of tensors are compared, and the
    //! compiler chooses.

    pub(super) fn same<T: Identity>(one: &T, other: &T) -> bool {
        one.is(other)
    }

    pub(super) trait Identity {
        fn is(&self, other: &Self) -> bool;
    }

    impl Identity for burn_cubecl::tensor::CubeTensor {
        fn is(&self, other: &Self) -> bool {
            let memory = |tensor: &Self| tensor.handle.clone().binding().memory.id().value;
            memory(self) == memory(other)
                && self.handle.offset_start == other.handle.offset_start
                && self.meta.shape() == other.meta.shape()
                && self.meta.strides() == other.meta.strides()
        }
    }

    // Every operation's result has an id of its own.
    impl<R: burn_fusion::FusionRuntime> Identity for burn_fusion::FusionTensor<R> {
        fn is(&self, other: &Self) -> bool {
            self.id == other.id
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shallow_loss_is_looked_at_everywhere_and_a_deep_one_at_quantiles() {
        assert!(depths(0).is_empty());
        assert_eq!(depths(5), [4, 3, 2, 1]);
        let deep = depths(100_000);
        assert_eq!(deep.len(), POINTS);
        assert!(deep.is_sorted_by(|one, next| one > next));
        assert!(deep[0] < 100_000 && deep[POINTS - 1] > 0);
    }
}
