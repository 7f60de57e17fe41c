mod file;
mod layout;
mod replicate;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::tensor::Tensor;

use self::layout::Layout;
pub(crate) use self::layout::{Float, Trainable};
use crate::accelerator::Accelerator;
use crate::error::{Error, Result};
use crate::gradient::Slot;

/// The models that were prepared, known by their parameters' ids.
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
        };
        model.visit(&mut search);
        if search.mixed {
            return Err(Error::misuse(
                "parts of this model were prepared as parts of different models: prepare it as \
                 one, after the others",
            ));
        }
        search.found.ok_or_else(|| {
            Error::misuse(
                "this model was not prepared, or got other parameter ids since (by loading a \
                 record): pass it through `Accelerator::prepare` before `backward`",
            )
        })
    }

    fn insert(&self, slot: Slot) {
        let slot = Arc::new(slot);
        let mut slots = self.0.lock().unwrap_or_else(PoisonError::into_inner);
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
        layout.check_against(&group.all_gather_object(&layout)?)?;
        let model = replicate::from_rank_zero(group, model, &layout)?;
        layout = Layout::of(&model);
        model
    } else {
        model
    };
    accelerator.shared.models.insert(Slot::new(
        layout.trainable(),
        accelerator.shared.settings.bucket_size,
    ));
    Ok(model)
}

struct Search<'a> {
    slots: &'a HashMap<ParamId, Arc<Slot>>,
    found: Option<Arc<Slot>>,
    mixed: bool,
}

impl ModuleVisitor for Search<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        match (&self.found, self.slots.get(&param.id)) {
            (Some(found), Some(slot)) => self.mixed |= !Arc::ptr_eq(found, slot),
            (None, Some(slot)) => self.found = Some(slot.clone()),
            (_, None) => {}
        }
    }
}
