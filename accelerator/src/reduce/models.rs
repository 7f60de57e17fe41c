use std::collections::HashMap;
use std::sync::Arc;

use accelerator_host::sync::Mutex;
use burn::module::{ModuleVisitor, Param, ParamId};
use burn::tensor::Tensor;

use super::model_state::ModelState;
use super::updates::SeenUpdates;
use crate::core::dyn_module::DynModule;
use crate::core::error::{self, Error, Once, Result};
use crate::model::{KEEP_THE_ID, Layout, Trainable};

/// The prepared models, by the ids of their parameters.
///
/// A model is Burn's own type, so this map does not notice when the program drops the last copy of it. An entry stays as
/// long as the accelerator lives, and takes a few hundred bytes for each parameter. The buckets of a model are freed when
/// another model is prepared.
#[derive(Debug, Default)]
pub(crate) struct Models {
    by_id: Mutex<HashMap<ParamId, Arc<ModelState>>>,
    said_replaced: Once,
}

impl Models {
    /// The state of a prepared model. Its values may have changed since.
    ///
    /// Trainable parameters identify the model: a part that is frozen in it may be a model of its own.
    pub(crate) fn find(&self, model: &dyn DynModule) -> Result<Arc<ModelState>> {
        Ok(self.search(model)?.0)
    }

    /// Finds a model that is trained, as [`find`](Self::find) does: fails if it has trainable parameters that it did
    /// not have, or that were frozen, when it was prepared.
    pub(super) fn find_to_train(&self, model: &dyn DynModule) -> Result<Arc<ModelState>> {
        let (model_state, unprepared) = self.search(model)?;
        match unprepared.is_empty() {
            true => Ok(model_state),
            false => Err(unprepared_error(model, &model_state, &unprepared)),
        }
    }

    /// Returns the state of a prepared model, and those of its trainable parameters that the state does not know.
    fn search(&self, model: &dyn DynModule) -> Result<(Arc<ModelState>, Vec<ParamId>)> {
        let known = self.by_id.lock();
        let mut search = IdSearch {
            known: &known,
            trained: FoundIds::default(),
            frozen: FoundIds::default(),
            unprepared: Vec::new(),
            trains: false,
            is_clone_from_before: false,
        };
        model.visit(&mut search);
        let IdSearch {
            trained,
            frozen,
            unprepared,
            trains,
            is_clone_from_before,
            ..
        } = search;
        if is_clone_from_before {
            return Err(Error::misuse(
                "this model is a clone from before `prepare`, which is another model than the prepared one (on \
                 ranks other than 0, its parameters have other ids): continue with what `prepare` gave back, and clone \
                 that",
            ));
        }
        let found = match trained {
            FoundIds::None => frozen,
            trained => trained,
        };
        match found {
            FoundIds::One(model_state) => Ok((model_state, unprepared)),
            FoundIds::Several => Err(Error::misuse(
                "parts of this model were prepared as parts of different models: prepare it as \
                 one, after the others",
            )),
            FoundIds::None => Err(Error::misuse(if !trains {
                "this model has no trainable parameter, so nothing is known of it, prepared or not: unfreeze \
                 some, and prepare it then"
            } else {
                "this model was not prepared, is a clone from before `prepare`, or got other parameter ids since \
                 (by loading a record, or from `Param::from_tensor`): pass it through `Accelerator::prepare` before `backward`, and continue with \
                 what that gives back"
            })),
        }
    }

    /// The models for which `backward` was called and no optimizer stepped, each by the path of its first parameter.
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

    /// The models that the program may have trained without `backward`, each by the path of its first parameter: neither was
    /// another model trained, beside which this one may be a target, nor were its replicas compared.
    pub(crate) fn untrained(&self) -> Vec<String> {
        let trains_another = self.models().any(|model_state| model_state.was_trained());
        let untrained = self
            .models()
            .filter(|model_state| !trains_another && !model_state.was_compared());
        let firsts = untrained
            .filter_map(|model_state| Some(model_state.parameters().first()?.path.clone()));
        firsts.collect()
    }

    /// The trainable parameter with this id, of any prepared model.
    pub(crate) fn parameter(&self, id: ParamId) -> Option<Trainable> {
        let known = self.by_id.lock();
        let model_state = known.get(&id)?;
        Some(model_state.parameters()[model_state.number(id)?].clone())
    }

    /// Returns `true` if this rank holds only pieces of parameters of a model.
    pub(crate) fn hold_pieces(&self) -> bool {
        self.models().any(|model_state| {
            let mut parameters = model_state.parameters().iter();
            parameters.any(|parameter| parameter.piece.is_some())
        })
    }

    /// Warns at the end of the program of each model whose window still holds micro-steps.
    pub(crate) fn warn_open_windows(&self) {
        self.models()
            .for_each(|model_state| model_state.warn_open_window());
    }

    /// Returns `true` if a model is in the middle of a round of local training, in which the replicas differ.
    pub(crate) fn is_any_apart(&self) -> bool {
        self.models()
            .any(|model_state| model_state.round().is_apart())
    }

    /// Returns the updates of each model on this rank, in an order that is the same on all ranks.
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

    pub(crate) fn release_spares(&self) {
        self.models()
            .for_each(|model_state| model_state.release_spare());
    }

    /// Forgets the copies for forward passes that no `backward` will use.
    pub(crate) fn forget_working_copies(&self) {
        self.models()
            .for_each(|model_state| drop(model_state.take_working()));
    }

    fn models(&self) -> impl Iterator<Item = Arc<ModelState>> {
        let known = self.by_id.lock();
        let firsts = known
            .iter()
            .filter(|(id, model_state)| model_state.number(**id) == Some(0));
        let models: Vec<_> = firsts.map(|(_, model_state)| model_state.clone()).collect();
        models.into_iter()
    }

    /// The state of the model with exactly these parameters, trained or frozen.
    pub(super) fn with_parameters(&self, layout: &Layout) -> Option<Arc<ModelState>> {
        let ids = layout.ids();
        let known = self.by_id.lock();
        let known = |id: &u64| known.get(&ParamId::from(*id));
        ids.iter()
            .filter_map(known)
            .find(|model_state| model_state.ids() == ids)
            .cloned()
    }

    /// Warns once if `layout`, before it is added, has a new parameter in place of one parameter of a known model and
    /// shares the others: the optimizer has no state for the new one.
    pub(super) fn warn_replaced(&self, layout: &Layout) {
        let Some(path) = self.replaced(layout) else {
            return;
        };
        if self.said_replaced.first() {
            error::warn(&format!(
                "a model is prepared again with another parameter in the place of `{path}`: {KEEP_THE_ID} (this warning \
                 is given once)"
            ));
        }
    }

    fn replaced(&self, layout: &Layout) -> Option<String> {
        let trainable = layout.trainable();
        let known = self.by_id.lock();
        let models: Vec<_> = trainable
            .iter()
            .filter_map(|it| known.get(&it.id))
            .collect();
        if models.is_empty() {
            return None;
        }
        let ids = layout.ids();
        let has_place_of = |new: &Trainable| {
            let replaced = |old: &Trainable| old.path == new.path && !ids.contains(&old.id.val());
            models
                .iter()
                .any(|model| model.parameters().iter().any(replaced))
        };
        let mut unknown = trainable.iter().filter(|it| !known.contains_key(&it.id));
        Some(unknown.find(|new| has_place_of(new))?.path.clone())
    }

    /// Adds a model, and replaces the entry of an earlier `prepare` of it.
    pub(super) fn insert(&self, layout: &Layout, model_state: ModelState) {
        // The entry may have ids of parameters that are frozen now.
        self.forget(layout);
        let model_state = Arc::new(model_state);
        let mut known = self.by_id.lock();
        // A model that is still trained allocates its buckets again.
        known
            .values()
            .for_each(|model_state| model_state.release_spare());
        for parameter in model_state.parameters() {
            known.insert(parameter.id, model_state.clone());
        }
    }

    pub(super) fn forget(&self, layout: &Layout) {
        if let Some(before) = self.with_parameters(layout) {
            self.by_id
                .lock()
                .retain(|_, model_state| !Arc::ptr_eq(model_state, &before));
        }
    }
}

/// Returns the error for trainable parameters that a prepared model does not know.
fn unprepared_error(
    model: &dyn DynModule,
    model_state: &ModelState,
    unprepared: &[ParamId],
) -> Error {
    let was_frozen = |id: &ParamId| model_state.ids().contains(&id.val());
    let layout = Layout::of(model);
    let path = |id: &ParamId| layout.path_of(id.val()).unwrap_or_default();
    Error::misuse(match unprepared.iter().find(|id| !was_frozen(id)) {
        Some(id) => format!(
            "the model did not have its parameter `{}`, with the id {id}, when it was prepared; {KEEP_THE_ID}; if the \
             parameter is new, prepare the model again",
            path(id)
        ),
        None => format!(
            "{} parameters of the model (`{}`, …) were frozen when it was prepared: prepare the model again after \
             unfreezing them",
            unprepared.len(),
            unprepared.first().map(path).unwrap_or_default()
        ),
    })
}

struct IdSearch<'a> {
    known: &'a HashMap<ParamId, Arc<ModelState>>,
    /// The models of its trainable parameters.
    trained: FoundIds,
    /// The models of its frozen parameters: all parameters, if the model is one for evaluation.
    frozen: FoundIds,
    /// The trainable parameters that belong to no known model.
    unprepared: Vec<ParamId>,
    trains: bool,
    /// Set if a trainable parameter is one that was given to `prepare`, not one that `prepare` returned.
    is_clone_from_before: bool,
}

/// The models that a set of parameters belongs to.
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
            if trains {
                self.unprepared.push(param.id);
            }
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
