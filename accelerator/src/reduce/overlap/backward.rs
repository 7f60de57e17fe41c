use core::mem::take;
use std::sync::Arc;

use accelerator_collective::ProcessGroup;
use accelerator_host::sync::Mutex;
use burn::backend::DispatchTensor;
use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;

use super::agree::{CalibrationOutcome, WindowObservation};
use super::calibration::{self, Calibration};
use super::ready_order::{FlushPoint, ReadyOrder, flush_points};
use super::scheduler::{OverlapScheduler, SchedulerPhase};
use super::{Anchors, Observer, ProbePoint, identity, watch};
use crate::core::autodiff;
use crate::core::error::Result;
use crate::precision::Cast;
use crate::reduce::element_values;
use crate::reduce::model_state::ModelState;
use crate::reduce::reducer::{ReducedWindow, Reducer, Repair};
use crate::reduce::working_parts::{WorkingCopy, WorkingPart};

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

    /// Runs backward, while `reducer` sends what is ready if it is known where to look. Tells what was
    /// learnt in it.
    pub(in crate::reduce) fn backward<M: Module>(
        &mut self,
        loss: Tensor<1>,
        model: &M,
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
                    let gradients = GradientsParams::from_grads(loss.backward(), model);
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
            SchedulerPhase::Off | SchedulerPhase::Sending(_) | SchedulerPhase::GivenUp => None,
        };
        let Some((task, probes)) = watched else {
            // Nobody compares what its casts make.
            drop((copy, casts));
            let gradients = GradientsParams::from_grads(loss.backward(), model);
            return (gradients, reducer, None);
        };
        let reducer = match task {
            ProbeTask::Sending(_) => reducer.with_casts(casts.clone()),
            _ => reducer,
        };
        let observer = Arc::new(BackwardObserver(Mutex::new(Some((task, reducer)))));
        let watching: Arc<dyn Observer> = observer.clone();
        let gradients = watch(loss, &mut self.anchors, probes, &watching).backward();
        let gradients = GradientsParams::from_grads(gradients, model);
        drop(watching);
        let (task, reducer) = observer.close();
        let observation = match task {
            ProbeTask::Measuring(depth) => Some(WindowObservation::Places(depth)),
            ProbeTask::Calibrating(calibration) => Some(WindowObservation::Learnt(
                calibration.result(|index, seen| {
                    let gradient =
                        element_values::peek(&gradients, &model_state.parameters()[index]);
                    let cast = casts.get(index).and_then(Option::as_deref);
                    gradient.is_some_and(|gradient| identity::is_of(seen, &gradient, cast))
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
        self.buckets = reduced.bucket_set.layout.len();
        self.early = reduced.early;
        if let SchedulerPhase::Sending(_) = self.phase {
            self.early_total += reduced.early as u64;
            self.windows += 1;
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
                        tracing::debug!("no gradient of this model is ready before backward ends");
                        self.phase = SchedulerPhase::Off;
                    }
                    CalibrationOutcome::Order(order) => {
                        let ready = learning.ready(parameters);
                        self.phase = SchedulerPhase::Sending(lay_out(&order, &ready, model_state)?);
                    }
                }
            }
            SchedulerPhase::Sending(_) if reduced.repaired > 0 => {
                self.repairs += 1;
                if self.repairs >= MAX_REPAIRS {
                    tracing::warn!(
                        step = model_state.steps(),
                        "gradients became ready in another order than before in {MAX_REPAIRS} \
                         steps, and had to be reduced again: from now on, gradients of this model are \
                         sent when backward has ended (said once)"
                    );
                    self.phase = SchedulerPhase::GivenUp;
                    self.anchors = Anchors::default();
                    // No step is undone any more.
                    reduced.bucket_set.undo.fill_with(|| None);
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
    let depths = calibration::depths(depth).into_iter();
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
    fn of<M: Module>(
        model: &M,
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
