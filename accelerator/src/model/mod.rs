//! Model files: what is written, what is read, and what of it fits.
//!
//! [`Accelerator::save_model`](crate::Accelerator::save_model) and
//! [`load_model`](crate::Accelerator::load_model) write and read safetensors files, which every
//! other tool opens; the types here say how.

mod buffers;
mod dtype;
mod file;
mod file_layout;
mod layout;
mod leaves;
mod load;
mod options;
mod read;
mod recorded;
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

pub(crate) use self::buffers::settle_statistics;
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
use crate::error::{Error, Result};
use crate::gradient::Slot;
use crate::gradient::hook::Held;
use crate::outcome::Failure;
use crate::precision::ScalerState;

/// The models that were prepared, known by their parameters' ids.
///
/// Nothing tells when a program has dropped the last copy of a model, which is Burn's own type: so its entry
/// stays as long as the accelerator lives, with a few hundred bytes for each parameter. The memory in which its
/// gradients travelled is given back when another model is prepared.
#[derive(Debug, Default)]
pub(crate) struct Models(Mutex<HashMap<ParamId, Arc<Slot>>>);

impl Models {
    /// The slot of a prepared model, whatever has become of its values since.
    ///
    /// What a model trains tells which one it is: a part that is frozen in it may be a model of its own.
    pub(crate) fn find<M: Module>(&self, model: &M) -> Result<Arc<Slot>> {
        let slots = self.lock();
        let mut search = Search {
            slots: &slots,
            trained: Found::default(),
            frozen: Found::default(),
            trains: false,
            is_given: false,
        };
        model.visit(&mut search);
        let Search {
            trained,
            frozen,
            trains,
            is_given,
            ..
        } = search;
        if is_given {
            return Err(Error::misuse(
                "this model is a clone from before `prepare`, which is another model than the prepared one (on \
                 ranks other than 0, its parameters have other ids): go on with what `prepare` gave back, and clone \
                 that",
            ));
        }
        let found = match trained {
            Found::None => frozen,
            trained => trained,
        };
        match found {
            Found::One(slot) => Ok(slot),
            Found::Several => Err(Error::misuse(
                "parts of this model were prepared as parts of different models: prepare it as \
                 one, after the others",
            )),
            Found::None => Err(Error::misuse(if !trains {
                "this model has no trainable parameter, so nothing is known of it, prepared or not: unfreeze \
                 some, and prepare it then"
            } else {
                "this model was not prepared, is a clone from before `prepare`, or got other parameter ids since \
                 (by loading a record): pass it through `Accelerator::prepare` before `backward`, and go on with \
                 what that gives back"
            })),
        }
    }

    /// By the first of its parameters: the models for which `backward` was never called.
    pub(crate) fn untrained(&self) -> Vec<String> {
        let slots = self.lock();
        let firsts = slots.iter().filter_map(|(id, slot)| {
            let first = slot.parameters().first()?;
            (first.id == *id && !slot.was_trained()).then(|| first.path.clone())
        });
        firsts.collect()
    }

    /// A trainable parameter of a prepared model.
    pub(crate) fn parameter(&self, id: ParamId) -> Option<Trainable> {
        let slots = self.lock();
        let slot = slots.get(&id)?;
        Some(slot.parameters()[slot.number(id)?].clone())
    }

    /// Says of which models micro-steps are left, now that the program is at its end.
    pub(crate) fn report_lost(&self) {
        for (id, slot) in self.lock().iter() {
            // Once for all of its parameters.
            if slot.number(*id) == Some(0) {
                slot.report_lost();
            }
        }
    }

    /// The slot of the model with all of these parameters, and no others, trained or frozen.
    fn same(&self, layout: &Layout) -> Option<Arc<Slot>> {
        let ids = layout.ids();
        let slots = self.lock();
        let known = |id: &u64| slots.get(&ParamId::from(*id));
        ids.iter()
            .filter_map(known)
            .find(|slot| slot.ids() == ids)
            .cloned()
    }

    /// Makes a model known; where it was before, as what it is now.
    fn insert(&self, layout: &Layout, slot: Slot) {
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

    fn lock(&self) -> MutexGuard<'_, HashMap<ParamId, Arc<Slot>>> {
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
    let recorded = recorded::check(&model);
    let model = if model.devices().iter().all(|found| *found == device) {
        model
    } else {
        model.fork(&device)
    };
    // Reading the layout initialises lazy parameters, in one order on every rank.
    let layout = Layout::of(&model);
    let known = accelerator.shared.models.same(&layout);
    let ready = known.as_ref().map(|slot| check_between_steps(slot));
    let group = accelerator.group();
    if group.world_size() == 1 {
        recorded?;
        ready.transpose()?;
        return make_known(accelerator, model, known.as_deref());
    }
    let preparing = group.for_purpose("prepare a model");
    let ready_told = ready
        .as_ref()
        .map(|ready| ready.as_ref().copied().map_err(Failure::of));
    let recorded_told = recorded.as_ref().copied().map_err(Failure::of);
    let told = (recorded_told, layout.clone(), ready_told);
    let all = preparing.all_gather_object(&told)?;
    recorded?;
    let (mut layouts, mut told) = (Vec::new(), Vec::new());
    for (rank, (recorded, layout, ready)) in all.into_iter().enumerate() {
        recorded.map_err(|failure: Failure| failure.into_error(rank, "prepare a model"))?;
        layouts.push(layout);
        told.push(ready);
    }
    layout.check_against(&layouts)?;
    // One that is new on some rank is new on all of them.
    let told: Option<Vec<Result<(), Failure>>> = told.into_iter().collect();
    let known = known.filter(|_| told.is_some());
    if let Some(told) = told {
        ready.transpose()?;
        for (rank, told) in told.into_iter().enumerate() {
            told.map_err(|failure| failure.into_error(rank, "prepare the model again"))?;
        }
        // Each rank has statistics of its own, which rank 0's replace.
        accelerator.sync_buffers(&model)?;
    }
    let model = replicate::from_rank_zero(group, model, &layout)?;
    // Of rank 0's values, so all ranks come to the same answer.
    make_known(accelerator, model, known.as_deref())
}

/// Makes a model known that was given `before`, or is new.
fn make_known<M: Module>(accelerator: &Accelerator, model: M, before: Option<&Slot>) -> Result<M> {
    let tied = TiedParameters::checked(&model)?;
    let (model, given_leaf) = leaves::renew(model);
    let model = tied.retie(model);
    let standing = match before {
        Some(before) => Standing {
            given_leaf: before.given_leaf(),
            scaler: before.scaler_state(),
            steps: before.steps(),
        },
        None => Standing {
            given_leaf,
            ..Standing::default()
        },
    };
    let hook = accelerator.communication_hook();
    insert(accelerator, &model, standing, hook);
    Ok(model)
}

/// Refuses to prepare a model again where what it did since its last step would be lost.
fn check_between_steps(slot: &Slot) -> Result<()> {
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
    hook: Option<Held>,
) -> Result<M> {
    let given = Layout::of(&model);
    let model = restore_values(accelerator, model, path, saved)?;
    // Nothing has the ids any more under which the model was prepared.
    accelerator.shared.models.forget(&given);
    let standing = Standing {
        given_leaf: None,
        scaler,
        steps,
    };
    insert(accelerator, &model, standing, hook);
    Ok(model)
}

/// What a model brings along from before it is made known.
#[derive(Default)]
struct Standing {
    /// See [`Slot::is_given`].
    given_leaf: Option<u64>,
    /// The scale of its losses.
    scaler: Option<ScalerState>,
    steps: u64,
}

/// Makes a model known that stands so, with that hook.
fn insert<M: Module>(accelerator: &Accelerator, model: &M, standing: Standing, hook: Option<Held>) {
    let shared = &accelerator.shared;
    let layout = Layout::of(model);
    let slot = Slot::new(
        layout.trainable(),
        shared.settings.bucket_size,
        shared.overlap,
    );
    let scaler = accelerator.scaler().map(|fresh| match standing.scaler {
        Some(state) => fresh.with_state(state),
        None => fresh,
    });
    let slot = slot
        .with_ids(layout.ids())
        .with_tied(TiedParameters::of(model))
        .with_given_leaf(standing.given_leaf)
        .with_steps(standing.steps)
        .with_bad_losses(shared.settings.on_bad_loss)
        .with_scaler(scaler)
        .with_road(shared.road.clone(), hook);
    shared.models.insert(&layout, slot);
    shared.failed_calls.forget();
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

struct Search<'a> {
    slots: &'a HashMap<ParamId, Arc<Slot>>,
    /// By what takes a gradient.
    trained: Found,
    /// By the rest: all of a model for evaluation.
    frozen: Found,
    /// Whether there is a parameter that takes a gradient.
    trains: bool,
    /// Whether it is still what was given to `prepare`.
    is_given: bool,
}

#[derive(Default)]
enum Found {
    #[default]
    None,
    One(Arc<Slot>),
    Several,
}

impl ModuleVisitor for Search<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let trains = param.is_require_grad();
        self.trains |= trains;
        let Some(slot) = self.slots.get(&param.id) else {
            return;
        };
        self.is_given |= trains && slot.is_given(param);
        let found = match trains {
            true => &mut self.trained,
            false => &mut self.frozen,
        };
        match found {
            Found::None => *found = Found::One(slot.clone()),
            Found::One(known) if Arc::ptr_eq(known, slot) => {}
            Found::One(_) | Found::Several => *found = Found::Several,
        }
    }
}
