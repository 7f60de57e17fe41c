use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::tensor::Tensor;

use super::model_state::ModelState;
use super::updates::SeenUpdates;
use crate::core::error::{Error, Result};
use crate::model::{Layout, Trainable};

/// The models that were prepared, known by their parameters' ids.
///
/// Nothing tells when a program has dropped the last copy of a model, which is Burn's own type: so its entry
/// stays as long as the accelerator lives, with a few hundred bytes for each parameter. The memory in which its
/// gradients travelled is given back when another model is prepared.
#[derive(Debug, Default)]
pub(crate) struct Models(Mutex<HashMap<ParamId, Arc<ModelState>>>);

impl Models {
    /// The model state of a prepared model, whatever has become of its values since.
    ///
    /// What a model trains tells which one it is: a part that is frozen in it may be a model of its own.
    pub(crate) fn find<M: Module>(&self, model: &M) -> Result<Arc<ModelState>> {
        let known = self.lock();
        let mut search = IdSearch {
            known: &known,
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
            FoundIds::One(model_state) => Ok(model_state),
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
        let unstepped = self.models().filter(|model_state| {
            model_state.was_trained()
                && model_state.steps() == 0
                && model_state.open_micro_steps() == 0
        });
        let firsts = unstepped
            .filter_map(|model_state| Some(model_state.parameters().first()?.path.clone()));
        firsts.collect()
    }

    /// By the first of its parameters: the models for which `backward` was never called, and which may have been trained
    /// all the same: neither was another one trained, beside which it may be a target, nor were its replicas compared.
    pub(crate) fn untrained(&self) -> Vec<String> {
        let trains_another = self.models().any(|model_state| model_state.was_trained());
        let untrained = self
            .models()
            .filter(|model_state| !trains_another && !model_state.was_compared());
        let firsts = untrained
            .filter_map(|model_state| Some(model_state.parameters().first()?.path.clone()));
        firsts.collect()
    }

    /// A trainable parameter of a prepared model.
    pub(crate) fn parameter(&self, id: ParamId) -> Option<Trainable> {
        let known = self.lock();
        let model_state = known.get(&id)?;
        Some(model_state.parameters()[model_state.number(id)?].clone())
    }

    /// Warns of the models of which micro-steps are left, now that the program is at its end.
    pub(crate) fn warn_open_windows(&self) {
        self.models()
            .for_each(|model_state| model_state.warn_open_window());
    }

    /// Whether one of them is in the middle of a round of local training.
    pub(crate) fn is_any_apart(&self) -> bool {
        self.models()
            .any(|model_state| model_state.round().is_apart())
    }

    /// How each was updated on this rank, in an order that is the same on all of them.
    pub(crate) fn updates(&self) -> Vec<SeenUpdates> {
        let mut models: Vec<_> = self.models().collect();
        models.sort_by_key(|model_state| {
            model_state.parameters().first().map(|first| first.id.val())
        });
        models
            .iter()
            .map(|model_state| model_state.updates().seen())
            .collect()
    }

    /// Gives back the memory in which gradients of the models travel.
    pub(crate) fn release_spares(&self) {
        self.models()
            .for_each(|model_state| model_state.release_spare());
    }

    /// Each model once.
    fn models(&self) -> impl Iterator<Item = Arc<ModelState>> {
        let known = self.lock();
        let firsts = known
            .iter()
            .filter(|(id, model_state)| model_state.number(**id) == Some(0));
        let models: Vec<_> = firsts.map(|(_, model_state)| model_state.clone()).collect();
        models.into_iter()
    }

    /// The model state of the model with all of these parameters, and no others, trained or frozen.
    pub(super) fn same(&self, layout: &Layout) -> Option<Arc<ModelState>> {
        let ids = layout.ids();
        let known = self.lock();
        let known = |id: &u64| known.get(&ParamId::from(*id));
        ids.iter()
            .filter_map(known)
            .find(|model_state| model_state.ids() == ids)
            .cloned()
    }

    /// Makes a model known; where it was before, as what it is now.
    pub(super) fn insert(&self, layout: &Layout, model_state: ModelState) {
        // What is frozen now is known no more by what was trained then.
        self.forget(layout);
        let model_state = Arc::new(model_state);
        let mut known = self.lock();
        // One that still trains takes it again.
        known
            .values()
            .for_each(|model_state| model_state.release_spare());
        for parameter in model_state.parameters() {
            known.insert(parameter.id, model_state.clone());
        }
    }

    /// Removes the model state of the model with these parameters, if it is known.
    pub(super) fn forget(&self, layout: &Layout) {
        if let Some(before) = self.same(layout) {
            self.lock()
                .retain(|_, model_state| !Arc::ptr_eq(model_state, &before));
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<ParamId, Arc<ModelState>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct IdSearch<'a> {
    known: &'a HashMap<ParamId, Arc<ModelState>>,
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
        let Some(model_state) = self.known.get(&param.id) else {
            return;
        };
        self.is_clone_from_before |= trains && model_state.is_clone_from_before(param);
        let found = match trains {
            true => &mut self.trained,
            false => &mut self.frozen,
        };
        match found {
            FoundIds::None => *found = FoundIds::One(model_state.clone()),
            FoundIds::One(known) if Arc::ptr_eq(known, model_state) => {}
            FoundIds::One(_) | FoundIds::Several => *found = FoundIds::Several,
        }
    }
}
