//! Model files: what is written, what is read, and what of it fits.
//!
//! [`Accelerator::save_model`](crate::Accelerator::save_model) and
//! [`load_model`](crate::Accelerator::load_model) write and read safetensors files, which every
//! other tool opens; the types here say how.

mod autodiff_device;
mod buffers;
mod dtype;
mod file;
mod file_layout;
mod layout;
mod leaves;
mod load;
mod options;
mod read;
mod replicate;
mod report;
mod snapshot;
mod staged;
mod tied;
mod write;

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::tensor::Tensor;
use serde::{Deserialize, Serialize};

pub(crate) use self::buffers::{running_states, settle_statistics};
pub use self::file_layout::FileLayout;
pub(crate) use self::layout::{Float, Layout, Trainable};
pub(crate) use self::load::load_on_all;
pub use self::options::{LoadOptions, SaveOptions};
pub use self::report::{LoadReport, Misshapen, Mistyped};
pub(crate) use self::snapshot::ModelSnapshot;
pub(crate) use self::tied::TiedParameters;
pub use self::tied::retie_parameters;
pub(crate) use self::write::FileNames;
use crate::accelerator::Accelerator;
use crate::core::error::{Error, Result};
use crate::core::outcome::Failure;
use crate::precision::ScalerState;
use crate::reduce::hook::HookInstance;
use crate::reduce::{ModelState, SeenUpdates};

/// The models that were prepared, known by their parameters' ids.
///
/// Nothing tells when a program has dropped the last copy of a model, which is Burn's own type: so its entry
/// stays as long as the accelerator lives, with a few hundred bytes for each parameter. The memory in which its
/// gradients travelled is given back when another model is prepared.
#[derive(Debug, Default)]
pub(crate) struct Models(Mutex<HashMap<ParamId, Arc<ModelState>>>);

impl Models {
    /// The slot of a prepared model, whatever has become of its values since.
    ///
    /// What a model trains tells which one it is: a part that is frozen in it may be a model of its own.
    pub(crate) fn find<M: Module>(&self, model: &M) -> Result<Arc<ModelState>> {
        let slots = self.lock();
        let mut search = IdSearch {
            slots: &slots,
            trained: FoundIds::default(),
            frozen: FoundIds::default(),
            trains: false,
            is_clone_from_before: false,
        };
        model.visit(&mut search);
        let IdSearch {
            trained,
            frozen,
            trains,
            is_clone_from_before,
            ..
        } = search;
        if is_clone_from_before {
            return Err(Error::misuse(
                "this model is a clone from before `prepare`, which is another model than the prepared one (on \
                 ranks other than 0, its parameters have other ids): go on with what `prepare` gave back, and clone \
                 that",
            ));
        }
        let found = match trained {
            FoundIds::None => frozen,
            trained => trained,
        };
        match found {
            FoundIds::One(slot) => Ok(slot),
            FoundIds::Several => Err(Error::misuse(
                "parts of this model were prepared as parts of different models: prepare it as \
                 one, after the others",
            )),
            FoundIds::None => Err(Error::misuse(if !trains {
                "this model has no trainable parameter, so nothing is known of it, prepared or not: unfreeze \
                 some, and prepare it then"
            } else {
                "this model was not prepared, is a clone from before `prepare`, or got other parameter ids since \
                 (by loading a record): pass it through `Accelerator::prepare` before `backward`, and go on with \
                 what that gives back"
            })),
        }
    }

    /// By the first of its parameters: the models for which `backward` was called, and no optimizer stepped.
    pub(crate) fn unstepped(&self) -> Vec<String> {
        let unstepped = self
            .models()
            .filter(|slot| slot.was_trained() && slot.steps() == 0 && slot.open_micro_steps() == 0);
        let firsts = unstepped.filter_map(|slot| Some(slot.parameters().first()?.path.clone()));
        firsts.collect()
    }

    /// By the first of its parameters: the models for which `backward` was never called, and which may have been trained
    /// all the same: neither was another one trained, beside which it may be a target, nor were its replicas compared.
    pub(crate) fn untrained(&self) -> Vec<String> {
        let trains_another = self.models().any(|slot| slot.was_trained());
        let untrained = self
            .models()
            .filter(|slot| !trains_another && !slot.was_compared());
        let firsts = untrained.filter_map(|slot| Some(slot.parameters().first()?.path.clone()));
        firsts.collect()
    }

    /// A trainable parameter of a prepared model.
    pub(crate) fn parameter(&self, id: ParamId) -> Option<Trainable> {
        let slots = self.lock();
        let slot = slots.get(&id)?;
        Some(slot.parameters()[slot.number(id)?].clone())
    }

    /// Warns of the models of which micro-steps are left, now that the program is at its end.
    pub(crate) fn warn_open_windows(&self) {
        self.models().for_each(|slot| slot.warn_open_window());
    }

    /// How each was updated on this rank, in an order that is the same on all of them.
    pub(crate) fn updates(&self) -> Vec<SeenUpdates> {
        let mut models: Vec<_> = self.models().collect();
        models.sort_by_key(|slot| slot.parameters().first().map(|first| first.id.val()));
        models.iter().map(|slot| slot.updates().seen()).collect()
    }

    /// Each model once.
    fn models(&self) -> impl Iterator<Item = Arc<ModelState>> {
        let slots = self.lock();
        let firsts = slots
            .iter()
            .filter(|(id, slot)| slot.number(**id) == Some(0));
        let models: Vec<_> = firsts.map(|(_, slot)| slot.clone()).collect();
        models.into_iter()
    }

    /// The slot of the model with all of these parameters, and no others, trained or frozen.
    fn same(&self, layout: &Layout) -> Option<Arc<ModelState>> {
        let ids = layout.ids();
        let slots = self.lock();
        let known = |id: &u64| slots.get(&ParamId::from(*id));
        ids.iter()
            .filter_map(known)
            .find(|slot| slot.ids() == ids)
            .cloned()
    }

    /// Makes a model known; where it was before, as what it is now.
    fn insert(&self, layout: &Layout, slot: ModelState) {
        // What is frozen now is known no more by what was trained then.
        self.forget(layout);
        let slot = Arc::new(slot);
        let mut slots = self.lock();
        // One that still trains takes it again.
        slots.values().for_each(|slot| slot.release_spare());
        for parameter in slot.parameters() {
            slots.insert(parameter.id, slot.clone());
        }
    }

    /// Removes the slot of the model with these parameters, if it is known.
    fn forget(&self, layout: &Layout) {
        if let Some(before) = self.same(layout) {
            self.lock().retain(|_, slot| !Arc::ptr_eq(slot, &before));
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<ParamId, Arc<ModelState>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Makes the model draw what it would draw lazily, in the order in which Burn visits it.
pub(crate) fn draw_all<M: Module>(model: &M) {
    Layout::of(model);
}

/// See [`Accelerator::prepare`].
#[track_caller]
pub(crate) fn prepare<M: Module>(accelerator: &Accelerator, model: M) -> Result<M> {
    let device = accelerator.device();
    let on_autodiff = autodiff_device::check_autodiff(&model);
    let model = if model.devices().iter().all(|found| *found == device) {
        model
    } else {
        model.fork(&device)
    };
    // Reading the layout initialises lazy parameters, in one order on every rank.
    let layout = Layout::of(&model);
    let known = accelerator.shared.models.same(&layout);
    let between_steps = known.as_ref().map(|slot| check_between_steps(slot));
    let group = accelerator.group();
    if group.world_size() == 1 {
        on_autodiff?;
        between_steps.transpose()?;
        return make_known(accelerator, model, &layout, known.as_deref());
    }
    let report = |checked: &Result<()>| checked.as_ref().copied().map_err(Failure::of);
    let mine = PrepareReport {
        on_autodiff: report(&on_autodiff),
        layout: layout.clone(),
        between_steps: between_steps.as_ref().map(report),
    };
    let preparing = group.for_purpose("prepare a model");
    let reports: Vec<PrepareReport> = preparing.all_gather_object(&mine)?;
    on_autodiff?;
    let (mut layouts, mut all_between_steps) = (Vec::new(), Vec::new());
    for (rank, report) in reports.into_iter().enumerate() {
        let on_autodiff = report.on_autodiff;
        on_autodiff.map_err(|failure| failure.into_error(rank, "prepare a model"))?;
        layouts.push(report.layout);
        all_between_steps.push(report.between_steps);
    }
    layout.check_against(&layouts)?;
    // One that is new on some rank is new on all of them.
    let all_between_steps: Option<Vec<_>> = all_between_steps.into_iter().collect();
    let known = known.filter(|_| all_between_steps.is_some());
    if let Some(all_between_steps) = all_between_steps {
        between_steps.transpose()?;
        for (rank, between_steps) in all_between_steps.into_iter().enumerate() {
            between_steps.map_err(|failure| failure.into_error(rank, "prepare the model again"))?;
        }
        // Each rank has statistics of its own, which rank 0's replace.
        accelerator.sync_buffers(&model)?;
    }
    let model = replicate::from_rank_zero(group, model, &layout)?;
    // Parameters have rank 0's ids now, and running statistics keep each rank's own.
    let layout = Layout::of(&model);
    // Of rank 0's values, so all ranks come to the same answer.
    make_known(accelerator, model, &layout, known.as_deref())
}

/// What ranks tell each other of a model that they prepare.
#[derive(Deserialize, Serialize)]
struct PrepareReport {
    /// Whether it lies where gradients are recorded.
    on_autodiff: Result<(), Failure>,
    layout: Layout,
    /// Of one that was prepared before: whether nothing of a step of it is lost.
    between_steps: Option<Result<(), Failure>>,
}

/// Makes a model of that layout known, that was given `before`, or is new.
fn make_known<M: Module>(
    accelerator: &Accelerator,
    model: M,
    layout: &Layout,
    before: Option<&ModelState>,
) -> Result<M> {
    let tied = TiedParameters::checked(&model)?;
    let (model, leaf_before_prepare) = leaves::fresh_leaves(model);
    let model = tied.retie(model);
    let prior = match before {
        Some(before) => PriorState {
            leaf_before_prepare: before.leaf_before_prepare(),
            scaler: before.scaler_state(),
            steps: before.steps(),
        },
        None => PriorState {
            leaf_before_prepare,
            ..PriorState::default()
        },
    };
    let hook = accelerator.communication_hook();
    insert(accelerator, layout, tied, prior, hook);
    Ok(model)
}

/// Refuses to prepare a model again where what it did since its last step would be lost.
fn check_between_steps(slot: &ModelState) -> Result<()> {
    slot.round().check_together("prepare a model again")?;
    if slot.has_pending_step() {
        return Err(Error::misuse(
            "a model is prepared again while gradients of it wait for their step: give them to the optimizer, or \
             drop them, first",
        ));
    }
    match slot.open_micro_steps() {
        0 => Ok(()),
        open => Err(Error::misuse(format!(
            "a model is prepared again between optimizer steps, and {open} micro-steps of the next one are \
             done: end the window with `trigger_sync`, or prepare it at the end of an epoch; for a training \
             from the start, build the model anew, since a clone is the same model"
        ))),
    }
}

/// Gives a prepared model the values and ids that were saved at `path`, which rank 0 alone reads,
/// and makes it known by them, after so many steps, with that scale of its losses and that hook.
#[track_caller]
pub(crate) fn resume<M: Module>(
    accelerator: &Accelerator,
    model: M,
    path: &Path,
    saved: &Layout,
    steps: u64,
    scaler: Option<ScalerState>,
    hook: Option<HookInstance>,
) -> Result<M> {
    let given = Layout::of(&model);
    let model = restore_values(accelerator, model, path, saved)?;
    // Nothing has the ids any more under which the model was prepared.
    accelerator.shared.models.forget(&given);
    let prior = PriorState {
        leaf_before_prepare: None,
        scaler,
        steps,
    };
    let tied = TiedParameters::of(&model);
    insert(accelerator, &Layout::of(&model), tied, prior, hook);
    Ok(model)
}

/// What a model brings along from before it is made known.
#[derive(Default)]
struct PriorState {
    /// See [`ModelState::is_clone_from_before`].
    leaf_before_prepare: Option<u64>,
    /// The scale of its losses.
    scaler: Option<ScalerState>,
    steps: u64,
}

/// Makes a model of that layout known, in that state, with that hook.
fn insert(
    accelerator: &Accelerator,
    layout: &Layout,
    tied: TiedParameters,
    prior: PriorState,
    hook: Option<HookInstance>,
) {
    let shared = &accelerator.shared;
    let slot = ModelState::new(
        layout.trainable(),
        shared.settings.bucket_size,
        shared.overlap,
    );
    let scaler = accelerator.scaler().map(|fresh| match prior.scaler {
        Some(state) => fresh.with_state(state),
        None => fresh,
    });
    let slot = slot
        .with_ids(layout.ids())
        .with_tied(tied)
        .with_leaf_before_prepare(prior.leaf_before_prepare)
        .with_steps(prior.steps)
        .with_non_finite_losses(shared.settings.on_non_finite_loss)
        .with_scaler(scaler)
        .with_road(shared.road.clone(), hook);
    shared.models.insert(layout, slot);
    shared.failed_calls.reset();
}

/// Gives a model the values and ids that were saved at `path`, which rank 0 alone reads.
#[track_caller]
pub(crate) fn restore_values<M: Module>(
    accelerator: &Accelerator,
    model: M,
    path: &Path,
    saved: &Layout,
) -> Result<M> {
    saved.check_saved(&Layout::of(&model))?;
    let options = LoadOptions::new();
    let (model, _) = load_on_all(accelerator, model, path, &options, Some(&saved.ids()))?;
    Ok(model)
}

struct IdSearch<'a> {
    slots: &'a HashMap<ParamId, Arc<ModelState>>,
    /// By what takes a gradient.
    trained: FoundIds,
    /// By the rest: all of a model for evaluation.
    frozen: FoundIds,
    /// Whether there is a parameter that takes a gradient.
    trains: bool,
    /// Whether it is still what was given to `prepare`.
    is_clone_from_before: bool,
}

#[derive(Default)]
enum FoundIds {
    #[default]
    None,
    One(Arc<ModelState>),
    Several,
}

impl ModuleVisitor for IdSearch<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let trains = param.is_require_grad();
        self.trains |= trains;
        let Some(slot) = self.slots.get(&param.id) else {
            return;
        };
        self.is_clone_from_before |= trains && slot.is_clone_from_before(param);
        let found = match trains {
            true => &mut self.trained,
            false => &mut self.frozen,
        };
        match found {
            FoundIds::None => *found = FoundIds::One(slot.clone()),
            FoundIds::One(known) if Arc::ptr_eq(known, slot) => {}
            FoundIds::One(_) | FoundIds::Several => *found = FoundIds::Several,
        }
    }
}
