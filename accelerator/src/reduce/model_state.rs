use core::fmt;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use accelerator_collective::ProcessGroup;
use accelerator_host::sync::{Mutex, MutexGuard};
use burn::backend::DispatchTensor;
use burn::module::{Param, ParamId};
use burn::tensor::Tensor;

use super::backward_calls::BackwardGuard;
use super::bucket_layout::{BucketLayout, ShardMap};
use super::bucket_set::BucketSet;
use super::bucket_storage::Placement;
use super::device_reduce::DeviceReducer;
use super::hook::HookInstance;
use super::loss::{MicroLoss, OnNonFiniteLoss};
use super::overlap::{OverlapReport, OverlapScheduler, OverlapSwitch, ReadyOrder};
use super::updates::{LocalRound, Updates};
use super::warnings::ModelWarnings;
use super::window::Window;
use crate::core::autodiff;
use crate::core::error::{self, Result};
use crate::model::{TiedParameters, Trainable};
use crate::precision::{Cast, Finiteness, Scaler, ScalerState, SkipNotice};

/// The state that is kept for a prepared model: its gradients, their places, and the open window.
#[derive(Debug)]
pub(crate) struct ModelState {
    bucket_size: usize,
    pub(super) device_reducer: Arc<DeviceReducer>,
    hook: Option<HookInstance>,
    ids: Vec<u64>,
    pub(super) leaf_before_prepare: Option<u64>,
    numbers: HashMap<ParamId, usize>,
    pub(super) on_non_finite_loss: OnNonFiniteLoss,
    /// The report of the last window. It is apart from the scheduler, which is in use for the whole of a window.
    overlap_report: Mutex<OverlapReport>,
    parameters: Vec<Trainable>,
    /// Held by gradients that wait for their step.
    pub(super) pending_step: Arc<()>,
    /// The place of sums that are not cut.
    placement: Placement,
    pool: Mutex<BucketPool>,
    round: Mutex<LocalRound>,
    scaler: Mutex<Option<Scaler>>,
    scheduler: Mutex<OverlapScheduler>,
    steps: AtomicU64,
    tied: Arc<TiedParameters>,
    /// The guard of the threads that add to the window.
    pub(super) turn: BackwardGuard,
    updates: Updates,
    pub(super) warnings: ModelWarnings,
    /// Set once its replicas were compared before something becomes of them.
    was_compared: AtomicBool,
    was_trained: AtomicBool,
    wants_norm: AtomicBool,
    window: Mutex<Window>,
    working: Mutex<WorkingCopy>,
}

/// A model that becomes known, with its settings and what it brings along from before.
pub(super) struct ModelSettings {
    /// The size in bytes.
    pub(super) bucket_size: usize,
    pub(super) device_reducer: Arc<DeviceReducer>,
    pub(super) hook: Option<HookInstance>,
    /// The ids of all that the model holds, frozen parameters and buffers included, in order.
    pub(super) ids: Vec<u64>,
    /// The graph's leaf that the first parameter was when the program gave the model to `prepare`.
    pub(super) leaf_before_prepare: Option<u64>,
    pub(super) on_non_finite_loss: OnNonFiniteLoss,
    /// If on, buckets are laid out anew once it is known which gradients are ready first.
    pub(super) overlap: OverlapSwitch,
    pub(super) parameters: Vec<Trainable>,
    /// The scaler, if losses are scaled.
    pub(super) scaler: Option<Scaler>,
    /// The number of windows that an optimizer has stepped with before.
    pub(super) steps: u64,
    pub(super) tied: TiedParameters,
}

/// The copy of the parameters for the next forward.
#[derive(Debug, Default)]
pub(super) enum WorkingCopy {
    #[default]
    None,
    /// The part that the forward uses in place of each parameter, if that is another tensor.
    One(Vec<Option<WorkingPart>>),
    /// Several, whose gradients are added up at the end.
    Several,
}

/// The tensor that a forward pass in half precision uses in place of a parameter.
#[derive(Debug)]
pub(super) struct WorkingPart {
    pub(super) tensor: DispatchTensor,
    /// The cast that makes the parameter's gradient of that of this tensor, if it can be asked.
    pub(super) cast: Option<Arc<Cast>>,
}

/// The name that tells models apart, the same on all ranks.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct ModelName {
    first: Option<ParamId>,
}

impl ModelName {
    pub(super) fn number(self) -> u64 {
        self.first.map_or(0, |id| id.val())
    }
}

impl fmt::Display for ModelName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.first {
            Some(id) => write!(f, "that with the parameter {id}"),
            None => f.write_str("one without parameters"),
        }
    }
}

/// The layout of gradients, and a bucket set that is not in use.
#[derive(Debug)]
struct BucketPool {
    layout: Arc<BucketLayout>,
    spare: Option<Box<BucketSet>>,
}

impl BucketPool {
    fn fits(&self, bucket_set: &BucketSet) -> bool {
        Arc::ptr_eq(&bucket_set.layout, &self.layout)
            || bucket_set.layout.is_placed_as(&self.layout)
    }
}

impl ModelState {
    pub(super) fn new(settings: ModelSettings) -> Self {
        let parameters = settings.parameters;
        let order = ReadyOrder::reversed(parameters.len());
        let layout = BucketLayout::new(&parameters, &order, settings.bucket_size);
        let numbers = parameters.iter().enumerate();
        let scheduler = OverlapScheduler::new(settings.overlap);
        Self {
            bucket_size: settings.bucket_size,
            placement: match settings.hook {
                // Hooks reduce in memory.
                Some(_) => Placement::Host,
                None => settings.device_reducer.placement().clone(),
            },
            device_reducer: settings.device_reducer,
            hook: settings.hook,
            ids: settings.ids,
            leaf_before_prepare: settings.leaf_before_prepare,
            numbers: numbers.map(|(number, known)| (known.id, number)).collect(),
            on_non_finite_loss: settings.on_non_finite_loss,
            overlap_report: Mutex::new(scheduler.report()),
            pending_step: Arc::default(),
            pool: Mutex::new(BucketPool {
                layout: Arc::new(layout),
                spare: None,
            }),
            round: Mutex::default(),
            scaler: Mutex::new(settings.scaler),
            scheduler: Mutex::new(scheduler),
            steps: AtomicU64::new(settings.steps),
            tied: Arc::new(settings.tied),
            turn: BackwardGuard::default(),
            updates: Updates::default(),
            warnings: ModelWarnings::default(),
            was_compared: AtomicBool::new(false),
            was_trained: AtomicBool::new(false),
            wants_norm: AtomicBool::new(false),
            window: Mutex::default(),
            working: Mutex::default(),
            parameters,
        }
    }

    pub(super) fn model(&self) -> ModelName {
        let first = self.parameters.first();
        ModelName {
            first: first.map(|parameter| parameter.id),
        }
    }

    /// Returns the places of the model that hold the same parameter.
    pub(crate) fn tied(&self) -> &Arc<TiedParameters> {
        &self.tied
    }

    /// Returns `true` if a parameter is still the one that the program gave to `prepare`, and so of a clone from
    /// before. Checked before the first step only, since reading the leaf allocates.
    pub(crate) fn is_clone_from_before<const D: usize>(&self, param: &Param<Tensor<D>>) -> bool {
        let first = self.parameters.first().map(|first| first.id);
        self.leaf_before_prepare.is_some()
            && self.steps() == 0
            && first == Some(param.id)
            && autodiff::leaf_number(&param.val().into_dispatch()) == self.leaf_before_prepare
    }

    pub(crate) fn ids(&self) -> &[u64] {
        &self.ids
    }

    /// Returns the id that tells models apart, also if parts of them are frozen or unfrozen.
    pub(super) fn first_id(&self) -> u64 {
        self.ids.first().copied().unwrap_or_default()
    }

    /// Warns once that a loss is not finite, and names the ranks.
    pub(super) fn warn_non_finite_loss(&self, whose: &str, loss: f64) {
        let warnings = &self.warnings;
        warnings.non_finite_loss(self.steps(), whose, loss, self.loss_scale());
    }

    /// Returns `true` if `backward` reads the loss: on the CPU it is ready; `stop_at_non_finite_loss` waits for it.
    pub(super) fn reads_losses(&self) -> bool {
        matches!(self.placement, Placement::Host)
            || self.on_non_finite_loss == OnNonFiniteLoss::Fail
    }

    /// The loss of a micro-step: read, or as it lies on its device.
    pub(super) fn micro_loss(&self, loss: Option<Tensor<1>>) -> MicroLoss {
        match loss {
            None => MicroLoss::Unknown,
            Some(loss) if self.reads_losses() => MicroLoss::Read(loss.into_scalar::<f64>()),
            Some(loss) => MicroLoss::OnDevice(loss),
        }
    }

    pub(crate) fn hook(&self) -> Option<&HookInstance> {
        self.hook.as_ref()
    }

    /// Returns the factor of losses before backward.
    pub(crate) fn loss_scale(&self) -> Option<f64> {
        self.scaler.lock().as_ref().map(Scaler::scale)
    }

    /// Returns the state of the scale of losses, for a checkpoint.
    pub(crate) fn scaler_state(&self) -> Option<ScalerState> {
        self.scaler.lock().as_ref().map(Scaler::state)
    }

    /// Moves the scale by the outcome of a window.
    pub(super) fn update_loss_scale(&self, gradients: Finiteness) {
        if let Some(scaler) = &mut *self.scaler.lock() {
            scaler.update(gradients);
        }
    }

    /// Returns the reason to warn of the last skipped step, if there is one.
    pub(super) fn skip_notice(&self) -> Option<SkipNotice> {
        self.scaler.lock().as_ref().and_then(Scaler::skip_notice)
    }

    pub(crate) fn note_compared(&self) {
        self.was_compared.store(true, Ordering::Relaxed);
    }

    pub(crate) fn was_compared(&self) -> bool {
        self.was_compared.load(Ordering::Relaxed)
    }

    pub(super) fn note_trained(&self) {
        self.was_trained.store(true, Ordering::Relaxed);
    }

    /// Returns `true` if it was trained here, or before it was resumed.
    pub(crate) fn was_trained(&self) -> bool {
        self.was_trained.load(Ordering::Relaxed) || self.steps() > 0
    }

    /// Warns that an open window holds micro-steps that will never be stepped with.
    pub(super) fn warn_open_window(&self) {
        let (open, first) = (self.open_micro_steps(), self.parameters.first());
        if let Some(first) = first.filter(|_| open > 0) {
            let hint = match self.window().has_bare_weights() {
                true => {
                    "`backward` was given a number, which does not know where its epoch ends, so that windows run \
                     over the ends of epochs: pass `&batch`, or `batch.with_weight(number)`, or end the last window \
                     with `Weight::from(number).trigger_sync()`"
                }
                false => {
                    "end the last window with `batch.weight().trigger_sync()`, or run the epoch to its end"
                }
            };
            error::warn(&format!(
                "{open} micro-steps of the model with the parameter `{}` are in an accumulation window that is open, \
                 and no optimizer step came of them: {hint}",
                first.path
            ));
        }
    }

    pub(super) fn note_working(&self, parts: Vec<Option<WorkingPart>>) {
        let mut working = self.working.lock();
        *working = match *working {
            WorkingCopy::None => WorkingCopy::One(parts),
            WorkingCopy::One(_) | WorkingCopy::Several => WorkingCopy::Several,
        };
    }

    /// Takes the working copy that the forward of this backward used.
    pub(super) fn take_working(&self) -> WorkingCopy {
        let mut working = self.working.lock();
        core::mem::take(&mut *working)
    }

    pub(crate) fn parameters(&self) -> &[Trainable] {
        &self.parameters
    }

    pub(crate) fn number(&self, id: ParamId) -> Option<usize> {
        self.numbers.get(&id).copied()
    }

    /// Returns `true` if there are gradients of whole windows that no optimizer has stepped with yet.
    pub(crate) fn has_pending_step(&self) -> bool {
        Arc::strong_count(&self.pending_step) > 1
    }

    /// Returns the number of windows that an optimizer has stepped with, skipped ones included, over the whole job.
    pub(crate) fn steps(&self) -> u64 {
        self.steps.load(Ordering::Relaxed)
    }

    pub(super) fn count_step(&self) {
        self.steps.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn updates(&self) -> &Updates {
        &self.updates
    }

    /// Returns the number of micro-steps of the next step that are done.
    pub(crate) fn open_micro_steps(&self) -> usize {
        self.window().micro_steps()
    }

    pub(crate) fn round(&self) -> MutexGuard<'_, LocalRound> {
        self.round.lock()
    }

    /// Returns the layout of gradients, which is the same on every rank.
    pub(super) fn layout(&self) -> Arc<BucketLayout> {
        self.pool.lock().layout.clone()
    }

    pub(super) fn window(&self) -> MutexGuard<'_, Window> {
        self.window.lock()
    }

    /// Returns the report of the last window, without waiting: the program's hook may ask in the midst of a window.
    pub(crate) fn overlap_report(&self) -> OverlapReport {
        *self.overlap_report.lock()
    }

    pub(super) fn note_overlap(&self, report: OverlapReport) {
        *self.overlap_report.lock() = report;
    }

    pub(super) fn scheduler(&self) -> MutexGuard<'_, OverlapScheduler> {
        self.scheduler.lock()
    }

    /// A bucket set to fill: a used one where there is one, since its pages are warm.
    pub(super) fn lend(&self, group: &ProcessGroup) -> Box<BucketSet> {
        let mut pool = self.pool.lock();
        let spare = pool.spare.take();
        spare.unwrap_or_else(|| {
            let (placement, layout) = (self.placement_of(&pool.layout), pool.layout.clone());
            Box::new(BucketSet::new(
                group,
                placement,
                layout,
                self.parameters.len(),
            ))
        })
    }

    /// Gives the memory of the spare bucket set back; the next window takes some anew.
    pub(crate) fn release_spare(&self) {
        self.pool.lock().spare = None;
    }

    /// Keeps one bucket set, whose memory is laid out as the next window's.
    pub(super) fn take_back(&self, mut bucket_set: Box<BucketSet>) {
        let mut pool = self.pool.lock();
        let is_at_home = bucket_set.is_at(self.placement_of(&pool.layout));
        if pool.spare.is_none() && pool.fits(&bucket_set) && is_at_home && bucket_set.reopen() {
            bucket_set.layout = pool.layout.clone();
            pool.spare = Some(bucket_set);
        }
    }

    /// Lays the buckets out in another order, which all ranks have agreed on.
    pub(super) fn lay_out(&self, order: &ReadyOrder) -> Result<Arc<BucketLayout>> {
        let mut pool = self.pool.lock();
        let layout = BucketLayout::new(&self.parameters, order, self.bucket_size);
        let layout = Arc::new(match pool.layout.cuts() {
            Some(cuts) => layout.cut_at(&cuts.bounds)?,
            None => layout,
        });
        *pool = BucketPool {
            layout: layout.clone(),
            spare: None,
        };
        Ok(layout)
    }

    /// Gives each rank only the sums that it steps, from the next window on. All ranks call it between the same
    /// windows.
    pub(super) fn shard(&self, bounds: &Arc<ShardMap>) -> Result<()> {
        let mut pool = self.pool.lock();
        let layout = pool.layout.cut_at(bounds)?;
        self.replace(&mut pool, layout);
        Ok(())
    }

    /// Returns `true` if sums can be sharded: a hook reduces all of them.
    pub(super) fn can_shard(&self) -> bool {
        self.hook.is_none()
    }

    /// Shares out the sums of a window as those that are reduced now, whenever it was opened: ranks
    /// agree on the order of what they reduce, and on nothing else.
    pub(super) fn renew(&self, group: &ProcessGroup, bucket_set: &mut BucketSet) {
        let pool = self.pool.lock();
        if pool.fits(bucket_set) {
            bucket_set.layout = pool.layout.clone();
            bucket_set.move_to(group, self.placement_of(&pool.layout));
        }
    }

    /// Gives every rank all sums, from the next window on.
    pub(super) fn unshard(&self) {
        let mut pool = self.pool.lock();
        let layout = pool.layout.uncut();
        self.replace(&mut pool, layout);
    }

    /// Returns the place of sums with that layout. Sums that ranks get parts of are cut in memory.
    fn placement_of(&self, layout: &BucketLayout) -> &Placement {
        match layout.cuts().is_some() || layout.has_pieces() {
            true => &Placement::Host,
            false => &self.placement,
        }
    }

    fn replace(&self, pool: &mut BucketPool, layout: BucketLayout) {
        let placement = self.placement_of(&layout);
        pool.layout = Arc::new(layout);
        pool.spare = pool.spare.take().filter(|spare| spare.is_at(placement));
        if let Some(spare) = &mut pool.spare {
            spare.layout = pool.layout.clone();
        }
    }

    pub(super) fn bounds(&self) -> Option<Arc<ShardMap>> {
        let pool = self.pool.lock();
        pool.layout.cuts().map(|cuts| cuts.bounds.clone())
    }

    /// Notes that the norm of gradients was asked for, and may be again.
    pub(super) fn note_norm_wanted(&self) {
        self.wants_norm.store(true, Ordering::Relaxed);
    }

    /// Returns `true` if the norm of gradients is needed once a window is reduced.
    pub(super) fn wants_norm(&self) -> bool {
        self.wants_norm.load(Ordering::Relaxed) || self.scaler.lock().is_some()
    }
}
