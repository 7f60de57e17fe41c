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
mod load;
mod options;
mod read;
mod replicate;
mod report;
mod snapshot;
mod staged;
mod write;

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::tensor::Tensor;

pub(crate) use self::buffers::settle_statistics;
pub use self::file_layout::FileLayout;
pub(crate) use self::layout::{Float, Layout, Trainable};
pub(crate) use self::load::load_on_all;
pub use self::options::{LoadOptions, SaveOptions};
pub use self::report::{LoadReport, Misshapen, Mistyped};
pub(crate) use self::snapshot::ModelSnapshot;
pub(crate) use self::write::FileNames;
use crate::accelerator::Accelerator;
use crate::error::{Error, Result};
use crate::gradient::Slot;
use crate::gradient::hook::Held;
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
    pub(crate) fn find<M: Module>(&self, model: &M) -> Result<Arc<Slot>> {
        let slots = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut search = Search {
            slots: &slots,
            found: None,
            mixed: false,
            trains: false,
        };
        model.visit(&mut search);
        if search.mixed {
            return Err(Error::misuse(
                "parts of this model were prepared as parts of different models: prepare it as \
                 one, after the others",
            ));
        }
        search.found.ok_or_else(|| {
            Error::misuse(if !search.trains {
                "this model has no trainable parameter, so nothing is known of it, prepared or not: unfreeze \
                 some, and prepare it then"
            } else {
                "this model was not prepared, or got other parameter ids since (by loading a \
                 record): pass it through `Accelerator::prepare` before `backward`"
            })
        })
    }

    /// A trainable parameter of a prepared model.
    pub(crate) fn parameter(&self, id: ParamId) -> Option<Trainable> {
        let slots = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let slot = slots.get(&id)?;
        Some(slot.parameters()[slot.number(id)?].clone())
    }

    fn insert(&self, slot: Slot) {
        let slot = Arc::new(slot);
        let mut slots = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // One that still trains takes it again.
        slots.values().for_each(|slot| slot.release_spare());
        for parameter in slot.parameters() {
            slots.insert(parameter.id, slot.clone());
        }
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
    let model = if model.devices().iter().all(|found| *found == device) {
        model
    } else {
        model.fork(&device)
    };
    // Reading the layout initialises lazy parameters, in one order on every rank.
    let mut layout = Layout::of(&model);
    let group = accelerator.group();
    let model = if group.world_size() > 1 {
        let preparing = group.for_purpose("prepare a model");
        layout.check_against(&preparing.all_gather_object(&layout)?)?;
        let model = replicate::from_rank_zero(group, model, &layout)?;
        layout = Layout::of(&model);
        model
    } else {
        model
    };
    let slot = Slot::new(
        layout.trainable(),
        accelerator.shared.settings.bucket_size,
        accelerator.shared.overlap,
    );
    let slot = slot.with_scaler(accelerator.scaler());
    let hook = accelerator.communication_hook();
    let slot = slot.with_road(accelerator.shared.road.clone(), hook);
    accelerator.shared.models.insert(slot);
    Ok(model)
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
    let model = restore_values(accelerator, model, path, saved)?;
    let bucket_size = accelerator.shared.settings.bucket_size;
    let overlap = accelerator.shared.overlap;
    let slot = Slot::new(Layout::of(&model).trainable(), bucket_size, overlap);
    let going_on = accelerator.scaler().map(|fresh| match scaler {
        Some(state) => fresh.with_state(state),
        None => fresh,
    });
    let slot = slot.with_steps(steps).with_scaler(going_on);
    let slot = slot.with_road(accelerator.shared.road.clone(), hook);
    accelerator.shared.models.insert(slot);
    Ok(model)
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
    found: Option<Arc<Slot>>,
    mixed: bool,
    /// Whether there is a parameter that takes a gradient.
    trains: bool,
}

impl ModuleVisitor for Search<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.trains |= param.is_require_grad();
        match (&self.found, self.slots.get(&param.id)) {
            (Some(found), Some(slot)) => self.mixed |= !Arc::ptr_eq(found, slot),
            (None, Some(slot)) => self.found = Some(slot.clone()),
            (_, None) => {}
        }
    }
}
